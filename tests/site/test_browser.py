"""The site in headless Chromium, opened from disk: two widths, light and dark.

Needs Chromium, its driver and the extra `docs-test`: `apt-get install chromium chromium-driver`.
"""

import shutil

import pytest

pytest.importorskip('selenium', reason='needs selenium: pip install "open-tile-kernels[docs-test]"')
if shutil.which('chromium') is None or shutil.which('chromedriver') is None:
    pytest.skip('needs a browser: apt-get install chromium chromium-driver', allow_module_level=True)

PAGES = (
    *('index', 'docs/start', 'docs/benchmarks', 'docs/ops/quant.per_token_cast', 'docs/support', 'docs/api/quant'),
    *('docs/model', 'docs/notebooks/moe'),
)

QUIET = (
    *('--headless', '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-sync'),
    *('--disable-background-networking', '--disable-component-update', '--disable-dev-shm-usage'),
)

#: Texts whose contrast with their background is below 4.5, or 3 if they are large.
CONTRAST = """
const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
  for (let at = element; at; at = at.parentElement) {
    const found = rgb(getComputedStyle(at).backgroundColor);
    if (found.length === 3 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const texts = 'article p, article li, article td, article th, article h1, article h2, figcaption';
return [...document.querySelectorAll(texts)]
  .filter(e => e.innerText.trim() && e.offsetParent)
  .filter(e => {
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    const [a, b] = [light(rgb(style.color)), light(behind(e))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < (size >= 24 ? 3 : 4.5);
  }).map(e => e.innerText.slice(0, 60));
"""


@pytest.fixture(scope='module')
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which('chromium')
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    for word in QUIET:
        options.add_argument(word)
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which('chromedriver')))
    yield driver
    driver.quit()


@pytest.mark.parametrize('theme', ['light', 'dark'])
@pytest.mark.parametrize('width', [1280, 390])
def test_pages_fit_and_load_all_of_their_parts(browser, built, width, theme):
    media = {'features': [{'name': 'prefers-color-scheme', 'value': theme}]}
    browser.execute_cdp_cmd('Emulation.setEmulatedMedia', media)
    sizes = {'width': width, 'height': 900, 'deviceScaleFactor': 1, 'mobile': False}
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', sizes)
    for page in PAGES:
        browser.get((built / f'{page}.html').as_uri())
        assert browser.get_log('browser') == [], page
        wide = browser.execute_script('return document.documentElement.scrollWidth - window.innerWidth')
        assert wide <= 0, f'{page} scrolls by {wide} px at {width} px'
        broken = '[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)'
        assert browser.execute_script(f'return {broken}') == [], page
        assert browser.execute_script(CONTRAST) == [], page


def test_search_finds_an_op(browser, built):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get((built / 'search.html').as_uri() + '?q=per_token_cast')
    found = WebDriverWait(browser, 20).until(lambda page: page.find_elements(By.CSS_SELECTOR, '#search-results li a'))
    assert any('per_token_cast' in link.get_attribute('href') for link in found)


def test_the_numbers_of_an_op_open_with_the_keyboard(browser, built):
    browser.get((built / 'docs' / 'ops' / 'quant.per_token_cast.html').as_uri())
    browser.execute_script("document.querySelector('figure.plot summary').focus()")
    outline = 'const s = getComputedStyle(document.activeElement); return s.outlineStyle + s.boxShadow'
    assert browser.switch_to.active_element.tag_name == 'summary'
    browser.switch_to.active_element.send_keys('\ue007')
    assert browser.execute_script("return document.querySelector('figure.plot details').open")
    assert browser.execute_script(outline) != 'nonenone'
