"""Draws docs/step-times.svg from what `aengine-bench step` wrote into docs/results; with --check only compares and fails on a difference.

A picture of its own background, so that it can be read in light and in dark mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PICTURE = DOCS / "step-times.svg"
RESULTS = {"bfloat16": "amd-epyc-2cores-step.json", "int8": "amd-epyc-2cores-step-int8.json"}
MODELS = {"qwen3-60m": "60 M parameters", "qwen3-0.6b": "0.6 B parameters"}
WIDTH, HEIGHT, TOP, BOTTOM, BAR = 840, 320, 76, 262, 26
PANEL_WIDTH = 400

STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 }
  .value { font-size: 11px }
  .back { fill: #ffffff } .line { stroke: #8c959f } .bfloat16 { fill: #4c8dd6 } .int8 { fill: #e0923a }
  .floor { stroke: #1f2328; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .back { fill: #0d1117 } .floor { stroke: #e6edf3 }
  }
"""


def decode_steps(file: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """The date of a result and, by model, the figures of its decode steps."""
    result = json.loads((DOCS / "results" / file).read_text(encoding="utf-8"))
    steps = {entry["model"]: [step["figures"] for step in entry["steps"]] for entry in result["figures"]}
    return result["date"][:10], {
        model: [one for one in found if one["case"]["length"] == 1 and not one["case"].get("beside")] for model, found in steps.items()
    }


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'  <text x="{x:g}" y="{y:g}"{style} text-anchor="{anchor}">{words}</text>\n'


def panel(left: float, title: str, by_dtype: dict[str, list[dict[str, Any]]]) -> str:
    """The decode steps of one model: a bar for each dtype, and the floor of the bfloat16 step as a line."""
    steps = by_dtype["bfloat16"]
    scale = (BOTTOM - TOP) / max(max(step["milliseconds"], step["floor_milliseconds"]) for step in steps)
    out = text(left, 52, title)
    for i, step in enumerate(steps):
        x = left + 10 + i * (PANEL_WIDTH - 20) / len(steps)
        floor = round(BOTTOM - step["floor_milliseconds"] * scale, 1)
        for j, dtype in enumerate(RESULTS):
            value = by_dtype[dtype][i]["milliseconds"]
            height, at = round(value * scale, 1), x + j * (BAR + 6)
            out += f'  <rect class="{dtype}" x="{at:g}" y="{BOTTOM - height:g}" width="{BAR}" height="{height:g}"/>\n'
            above = BOTTOM - height
            if j == 0 and 0 < above - floor < 16:  # the number stands above the line of the floor too
                above = floor
            out += text(at + BAR / 2, round(above - 6, 1), f"{value:.1f}" if value < 100 else f"{value:.0f}", "value", "middle")
        out += f'  <line class="floor" x1="{x - 5:g}" y1="{floor:g}" x2="{x + BAR + 3:g}" y2="{floor:g}"/>\n'
        out += text(x + BAR + 3, BOTTOM + 18, str(step["case"]["rows"]), "", "middle")
    out += f'  <line class="line" x1="{left:g}" y1="{BOTTOM}" x2="{left + PANEL_WIDTH - 20:g}" y2="{BOTTOM}"/>\n'
    return out


def legend() -> str:
    y = HEIGHT - 12
    out = text(20, y, "sequences that decode together")
    for x, dtype in ((330, "bfloat16"), (430, "int8")):
        out += f'  <rect class="{dtype}" x="{x}" y="{y - 11}" width="13" height="13"/>\n' + text(x + 19, y, dtype)
    return (
        out + f'  <line class="floor" x1="500" y1="{y - 4}" x2="526" y2="{y - 4}"/>\n' + text(532, y, "floor of bfloat16 on this machine")
    )


def picture() -> str:
    """The SVG."""
    results = {dtype: decode_steps(file) for dtype, file in RESULTS.items()}
    dates = " and ".join(sorted({date for date, _ in results.values()}))
    out = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
    out += f"  <title>Milliseconds of a decode step</title>\n  <style>{STYLE}  </style>\n"
    out += f'  <rect class="back" width="{WIDTH}" height="{HEIGHT}" rx="6"/>\n'
    out += text(20, 28, f"Milliseconds of a decode step, 2 CPU cores, {dates}", "title")
    for i, (model, title) in enumerate(MODELS.items()):
        out += panel(20 + i * (PANEL_WIDTH + 10), title, {dtype: steps[model] for dtype, (_, steps) in results.items()})
    return out + legend() + "</svg>\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the picture is not that of the results")
    if not parser.parse_args().check:
        PICTURE.write_text(picture(), encoding="utf-8")
    elif picture() != PICTURE.read_text(encoding="utf-8"):
        print(f"{PICTURE.name} is out of date: run tools/step_picture.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
