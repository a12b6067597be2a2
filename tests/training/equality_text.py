"""What the runs of `equality` say: differences, tables and sentences.

Owns the arithmetic and the words. All is made from the JSON file alone, so that the page can be
checked against it; where a bound does not hold, the page says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["BLOCKS", "ONE", "PARTS", "as_json", "summarize", "tables", "with_tables"]

ONE = "1 rank"
PARTS = "1 rank, batch in 4 parts"
"""Gradients are summed in another order, and nothing is sharded."""
BLOCKS = "1 rank, blocks of 64 rows"
"""Newton-Schulz runs on blocks, as where ranks orthogonalize what they hold: must be seen."""
EARLY_STEPS, EARLY = 20, 1e-4
"""Losses of the first steps may differ by so much from those of one rank."""

BEGIN, END = "<!-- begin of equality -->", "<!-- end of equality -->"

Found = Mapping[str, Any]


def summarize(found: Found) -> dict[str, Any]:
    """Differences to one rank with the same seed, the noise of seeds, and bits that differ."""
    alone = {run["seed"]: run for run in found["parity"] if run["layout"] == ONE}
    layouts: dict[str, list[dict[str, float]]] = {}
    for run in found["parity"]:
        layouts.setdefault(run["layout"], []).append(_against(run, alone[run["seed"]]))
    ends = [run["validation"] for run in alone.values()]
    first = {run["layout"]: run for run in reversed(found["bits"])}
    return {
        "layouts": layouts,
        "seeds_differ_by": round(max(ends) - min(ends), 7),
        "bits_differ": [
            [run["layout"], run["runtime"]]
            for run in found["bits"]
            if any(run[key] != first[run["layout"]][key] for key in ("numbers", "tensors"))
        ],
    }


def _against(run: Found, alone: Found) -> dict[str, float]:
    """Largest difference of the first and of all steps; steps before one is above EARLY."""
    ours, theirs = (np.float32(each["losses"]).astype(float) for each in (run, alone))
    gaps = np.abs(ours - theirs).tolist()
    beyond = [step for step, gap in enumerate(gaps) if gap > EARLY]
    return {
        "seed": run["seed"],
        "early": float(f"{max(gaps[:EARLY_STEPS]):.2g}"),
        "all": float(f"{max(gaps):.2g}"),
        "within": beyond[0] if beyond else len(gaps),
        "validation": run["validation"],
        "end": round(run["validation"] - alone["validation"], 7),
    }


def as_json(found: Found) -> str:
    """One run a line."""
    parts = []
    for key, value in found.items():
        if isinstance(value, list):
            lines = ",\n".join(f"  {json.dumps(each)}" for each in value)
            parts.append(f"{json.dumps(key)}: [\n{lines}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value, indent=1)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def with_tables(page: str, found: Found) -> str:
    """The text of a page with these tables in place of those that are there."""
    before, begun, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ValueError(f"the page has no lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{tables(found)}\n\n{END}{after}"


def tables(found: Found) -> str:
    """All that is said of the runs, without a heading."""
    facts, summary = found["facts"], found["summary"]
    head = (
        f"{facts['parameters']:,} parameters in float32; {facts['steps']:,} steps of"
        f" {facts['tokens_per_step']:,} tokens, {facts['warmup_steps']} of them warm-up. Text:"
        f" {facts['text']}. Machine: {facts['machine']}, torch {facts['torch']}, Python"
        f" {facts['python']}, one thread a rank."
    )
    return "\n\n".join(
        [head, _parity(summary), _says_parity(found), _bits(found), _says_bits(found)]
    )


def _parity(summary: Found) -> str:
    header = ["ranks", f"first {EARLY_STEPS} steps", "all steps"]
    header += ["validation loss at the end", "against 1 rank"]
    rows = []
    for layout, seeds in summary["layouts"].items():
        row = [layout, *(_each(seeds, key, ".1e") for key in ("early", "all"))]
        row += [_each(seeds, "validation", ".5f"), _each(seeds, "end", "+.1e")]
        if layout == ONE:
            row[1] = row[2] = row[4] = "-"
        rows.append(row)
    return _table(header, rows)


def _says_parity(found: Found) -> str:
    layouts, noise = found["summary"]["layouts"], found["summary"]["seeds_differ_by"]
    parts, blocks = layouts[PARTS], layouts[BLOCKS]
    others = [each for k, v in layouts.items() if k not in (ONE, PARTS, BLOCKS) for each in v]
    early, everywhere = (max(each[key] for each in others) for key in ("early", "all"))
    end, own = (max(abs(each["end"]) for each in those) for those in (others, parts))
    caught = all(each["within"] < EARLY_STEPS for each in blocks)
    lines = [
        f"Steps: the largest difference of training loss to {ONE} with the same seed. The two"
        f" numbers of a cell are seeds {' and '.join(str(each['seed']) for each in parts)}.",
        f"Over the first {EARLY_STEPS} steps losses of several ranks differ from those of one by at"
        f" most {_small(early)}, {'within' if early <= EARLY else 'NOT WITHIN'} 1e-4."
        f" Over all {found['facts']['steps']} it is {_small(everywhere)}.",
        f"At the end their validation losses differ from those of one rank by at most"
        f" {_small(end)}, {'within' if end < noise else 'NOT WITHIN'} the {_small(noise)} between"
        " its two seeds.",
        f"One rank that takes its batch in 4 parts adds up gradients in another order too, and ends"
        f" {_small(own)} away from itself.",
        f"A wrong update {'is seen' if caught else 'is NOT SEEN'}: one rank that orthogonalizes"
        " blocks of 64 rows after the first step, as ranks would that take what they hold for the"
        f" whole, is beyond 1e-4 after {_each(blocks, 'within', 'd')} steps.",
    ]
    return "\n".join(f"- {line}" for line in lines)


def _bits(found: Found) -> str:
    header = ["ranks", "`optimizer.runtime`", "collectives a step", "bytes sent a step"]
    header += ["losses, norms, updates", "parameters and state"]
    first: dict[str, Found] = {}
    rows = []
    for run in found["bits"]:
        before = first.get(run["layout"])
        named = ", ".join(f"`{each.replace('=', ': ')}`" for each in run["runtime"])
        row = [run["layout"], named or ("defaults" if before is None else "defaults, once more")]
        row += [str(run["collectives"]), f"{run['bytes_sent']:,}"]
        for key in ("numbers", "tensors"):
            if before is None:
                row.append(f"`{run[key][:12]}`")
            else:
                row.append("equal" if run[key] == before[key] else "DIFFERENT")
        first.setdefault(run["layout"], run)
        rows.append(row)
    return _table(header, rows)


def _says_bits(found: Found) -> str:
    runs, differing = found["bits"], len(found["summary"]["bits_differ"])
    steps = runs[0]["steps"]
    if differing:
        return f"NOT EQUAL: {differing} of {len(runs)} runs of {steps} steps."
    return f"Equal: all {len(runs)} runs of {steps} steps."


def _each(seeds: Sequence[Found], key: str, form: str) -> str:
    return ", ".join(_short(format(seed[key], form)) for seed in seeds)


def _small(number: float) -> str:
    return _short(f"{number:.1e}")


def _short(number: str) -> str:
    return number.replace("e-0", "e-")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
