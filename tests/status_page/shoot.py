"""Takes the pictures of the status page: `python -m tests.status_page.shoot [FOLDER]`.

A simulated pair under a ramp that goes above the crossover and comes back below it; light and dark are
the same moment in two tabs. About half a minute.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
from pathlib import Path
from typing import Final, Literal

import uvloop
from PIL import Image

from tests.status_page.browser import running_browser, watched
from tests.status_page.stage import stage

FOLDER: Final = Path("deploy/pictures")
RAMP: Final = (1, 2, 3, 5, 7, 9, 11, 14, 17, 20, 22, 19, 15, 11, 8, 6)
LEVEL_S: Final = 1.6
SIZE: Final = {"width": 1180, "height": 1180}
COLOURS: Final = 255  # a page of text and lines needs no more, and is half the size
SCHEMES: Final[tuple[Literal["light", "dark"], ...]] = ("light", "dark")


async def shoot(folder: Path) -> None:
    """Write status-light.png and status-dark.png."""
    with tempfile.TemporaryDirectory() as scratch:
        async with (
            stage(Path(scratch), time_scale=0.6, acceptance_smoothing=120) as played,
            running_browser() as browser,
        ):
            for clients in RAMP:
                await played.load.turn(clients)
                await asyncio.sleep(LEVEL_S)
            for scheme in SCHEMES:
                async with watched(
                    browser, played.stack.admin_url, viewport=SIZE, color_scheme=scheme
                ) as tab:
                    await tab.open()
                    await tab.shown()
                    await asyncio.sleep(2.0)
                    path = folder / f"status-{scheme}.png"
                    picture = Image.open(io.BytesIO(await tab.page.screenshot(full_page=True)))
                    picture.convert("RGB").quantize(COLOURS, Image.Quantize.FASTOCTREE).save(
                        path, optimize=True
                    )
                    sys.stdout.write(f"{path}: {path.stat().st_size // 1024} KB\n")


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    target.mkdir(parents=True, exist_ok=True)
    uvloop.run(shoot(target))
