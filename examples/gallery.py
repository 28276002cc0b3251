"""Runs the examples in their short forms, on the CPU, and writes the gallery: `examples/README.md` and its pictures.

python examples/gallery.py                 all of them: minutes on two cores
python examples/gallery.py --only gnn vit  these again; the numbers of the others stay
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from lightning_remat import Plan
from lightning_remat.report import format_bytes, plan_figure

EXAMPLES = Path(__file__).resolve().parent
PICTURES = EXAMPLES / "pictures"
NUMBERS = PICTURES / "numbers.json"

SHOWN = {
    "byte_gpt": ("A GPT on source code", "what `make demo` runs: three budgets, compared", ""),
    "lora": ("LoRA", "a frozen language model with adapters: activations are nearly all there is", ""),
    "vit": ("Vision Transformer", "classification with a model of transformers", ""),
    "segmentation": ("Segmentation", "a U-Net with batch norm on a whole photograph", "--size 256 --width 8 --steps 6"),
    "diffusion": ("Diffusion", "a U-Net told the time; noise drawn in the step", ""),
    "speech": ("Speech", "CTC on waves of several lengths, each with its plan", ""),
    "gnn": ("Graph network", "messages along many edges", ""),
    "hf_loop": ("HF Trainer's loop", "with Fabric: accumulation, clipping, a schedule", ""),
    "ddp": ("DDP", "two processes, gradient buckets counted", "--small"),
    "fsdp2": ("FSDP2", "a shard of all in each of two processes, a plan for each unit, one budget for all", ""),
}
"""Each example's name, what it shows, and the options of its short form."""

OTHERS = {
    "fabric": "Fabric in the fewest lines",
    "batch_size_finder": "the largest batch that fits",
    "hydra": "the callback in a file of Hydra's",
    "lightning_cli": "the callback in a file of LightningCLI's",
}

HEAD = """# Examples

Each makes its data itself, trains on two cores in less than a minute, and has the command for a GPU in its README. In each
picture, above, the memory of a training step as it is; below, within the budget (dashed), with the same bits.

| example | memory of a step | peak without | with | time added |
|---|---|---|---|---|
"""

TAIL = """

On the CPU. Peaks with a star are measured; others, and the time that is added, are the plan's. As it is, a step takes a little
more than its picture shows, since eager mode writes less in place. `python examples/gallery.py` makes this page.

Without a picture of one step:

"""


def run(name: str) -> dict[str, Any]:
    """Run an example, draw its plan (of several, the largest step's), and return its numbers."""
    options = SHOWN[name][2].split()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(EXAMPLES / name / "train.py"), *options], cwd=folder, check=True)
        paths = sorted(Path(folder).rglob("remat/plan-*.json"), key=lambda path: int(path.stem.split("-")[1]))
        plans = [Plan.load(path) for path in paths]
        results = list(Path(folder).rglob("result.json"))
        numbers: dict[str, Any] = json.loads(results[0].read_text()) if results else {}
    whole = [plan for plan in plans if plan.whole is not None]  # the last one knows what was measured beside the graphs
    plan = whole[-1] if whole else max(plans, key=lambda one: one.baseline_peak_bytes)
    figure = plan_figure(plan, SHOWN[name][0])
    figure.set_size_inches(7.2, 4.8)
    figure.savefig(PICTURES / f"{name}.png", dpi=75)
    return {
        "without": numbers["without"]["peak_bytes"] if numbers else plan.baseline_peak_bytes,
        "with": numbers["with"]["peak_bytes"] if numbers else plan.of_whole().predicted_peak_bytes,
        "measured": bool(numbers),
        "equal": numbers.get("equal", True),
        "overhead": plan.of_whole().overhead,
    }


def page(numbers: dict[str, Any]) -> str:
    """The gallery, as Markdown."""
    rows = [_row(name, numbers[name]) for name in SHOWN if name in numbers]
    others = [f"- [{name}]({name}/README.md): {text}" for name, text in OTHERS.items()]
    return HEAD + "\n".join(rows) + TAIL + "\n".join(others) + "\n"


def _row(name: str, numbers: dict[str, Any]) -> str:
    title, text, _ = SHOWN[name]
    star = "*" if numbers["measured"] else ""
    peaks = [f"{format_bytes(numbers[one])}{star}" for one in ("without", "with")]
    picture = f"![memory of a step, before and after](pictures/{name}.png)"
    return f"| [{title}]({name}/README.md): {text} | {picture} | {' | '.join(peaks)} | {numbers['overhead']:+.1%} |"


def main() -> int:
    """Run, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SHOWN, default=list(SHOWN), help="these alone")
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for name in options.only:
        print(name, flush=True)
        numbers[name] = run(name)
        NUMBERS.write_text(json.dumps(numbers, indent=1, sort_keys=True) + "\n")
        (EXAMPLES / "README.md").write_text(page(numbers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
