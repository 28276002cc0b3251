"""The peers pictures: drawn again from the results that are committed, and what is joined in them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import peers
from benchmarks.comparison.picture import frontier, titles
from benchmarks.comparison.rows import OURS, Row
from tests.helpers.places import ROOT

RESULTS = ROOT / "benchmarks" / "results"
POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


@given(POINTS)
def test_what_is_joined_is_what_no_other_beats(points: list[tuple[int, int]]) -> None:
    rows = [Row(str(i), OURS, peak_bytes=peak, seconds=float(time)) for i, (peak, time) in enumerate(points)]
    joined = [(row.peak_bytes, row.seconds) for row in frontier(rows)]
    assert joined == sorted(joined) and len({peak for peak, _ in joined}) == len(joined)
    assert [time for _, time in joined] == sorted((time for _, time in joined), reverse=True)
    for peak, time in points:
        assert any(p <= peak and t <= time for p, t in joined), "beaten by what is joined, or joined"
    for p, t in joined:
        assert not any((peak <= p and time < t) or (peak < p and time <= t) for peak, time in points)


def test_a_title_is_short_and_nothing_is_lost() -> None:
    descriptions = ["GPT-2: 8 layers, dropout 0.1", "GPT-2: 8 layers, dropout 0", "ResNet-50: 3 x 224² images"]
    found = titles(descriptions)
    assert len({title for title, _ in found}) == 3 and found[2] == ("ResNet-50", "3 x 224² images")
    for description, (title, rest) in zip(descriptions, found, strict=True):
        assert sorted(set(description.replace(":", ",").split(", "))) == sorted({*title.split(", "), *rest.split(", ")})


@pytest.mark.parametrize(
    ("name", "options", "drawn"),
    [
        ("peers-cpu-cpu", [], "peers-cpu-cpu.png"),
        ("peers-cpu-cpu", ["--headline"], "peers-headline.png"),
        ("peers-cpu-gpt2-inductor", [], "peers-cpu-gpt2-inductor.png"),
    ],
)
def test_drawn_anew_from_the_results(name: str, options: list[str], drawn: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = shutil.copy(RESULTS / f"{name}.json", tmp_path)
    before = Path(file).read_bytes()
    assert peers.main(["--draw", str(file), *options]) == 0
    assert Path(file).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.json", drawn}
    assert (tmp_path / drawn).stat().st_size > 20_000
