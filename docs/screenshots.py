"""python docs/screenshots.py OUT F.html…: every report as a picture, 1200 and 400 wide, light and dark.

And the section of each plot apart, as README shows them: NAME-windows.png, NAME-timeline.png. Needs Debian's chromium
and chromium-driver.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from testing.browser import browser, load, missing, screenshot, show_as

WIDTHS = (1200, 400)


def main(out: Path, reports: list[Path]) -> None:
    """Writes OUT/NAME-WIDTH-light.png and -dark.png."""
    if lacking := missing():
        sys.exit(lacking)
    out.mkdir(parents=True, exist_ok=True)
    with browser() as driver:
        for path in reports:
            for width in WIDTHS:
                for dark in (False, True):
                    show_as(driver, width, 900, dark=dark)
                    load(driver, path)
                    target = out / f"{path.stem}-{width}-{'dark' if dark else 'light'}.png"
                    screenshot(driver, target)
                    print(target)
            show_as(driver, WIDTHS[0], 1400, dark=False)
            load(driver, path)
            for figure in driver.find_elements("css selector", "figure"):
                target = out / f"{path.stem}-{figure.get_attribute('id')}.png"
                target.write_bytes(figure.find_element("xpath", "./..").screenshot_as_png)
                print(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
