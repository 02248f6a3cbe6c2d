"""Settings of Sphinx; `make site` builds with them."""

project = 'tile_kernels'
html_title = 'tile_kernels'
extensions = ['myst_parser', 'sphinx_copybutton']
myst_heading_anchors = 3
myst_enable_extensions = ['colon_fence']
include_patterns = ['index.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'docs/**']
exclude_patterns = ['docs/conf.py', 'docs/examples/**']  # API pages show the examples
suppress_warnings = ['misc.highlighting_failure']  # interpreter reports in python blocks
html_theme = 'furo'
html_static_path = ['static']
html_css_files = ['plots.css']
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
copybutton_prompt_text = r'>>> |\.\.\. |\$ '
copybutton_prompt_is_regexp = True
nitpicky = True
