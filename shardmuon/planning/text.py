"""Plans as JSON, exactly: what was dumped is loaded as an equal plan with an equal digest.

Owns the form. Torch-free, so that a plan can be looked at, kept and compared anywhere.
"""

from __future__ import annotations

import json
from typing import Any

from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import Matrix, Panel
from shardmuon.planning.plan import Bucket, Plan

__all__ = ["dumps", "loads"]

FORM = 2


def dumps(plan: Plan) -> str:
    """JSON of `plan`; meshes and layouts, which many matrices share, are listed once."""
    meshes = list(plan.meshes)
    layouts = list(dict.fromkeys(matrix.layout for matrix, _ in plan))
    places = {layout: index for index, layout in enumerate(layouts)}
    return json.dumps(
        {
            "form": FORM,
            "exchange": plan.exchange,
            "settings": plan.settings,
            "overlap": plan.overlap,
            "meshes": [[mesh.ranks, mesh.shape, mesh.axis_names] for mesh in meshes],
            "layouts": [[meshes.index(layout.mesh), layout.splits] for layout in layouts],
            "buckets": [
                [
                    bucket.repeated,
                    [
                        [_matrix(matrix, places[matrix.layout]), owner]
                        for matrix, owner in zip(bucket.matrices, bucket.owners, strict=True)
                    ],
                ]
                for bucket in plan.buckets
            ],
        }
    )


def loads(text: str) -> Plan:
    """The plan that was dumped. Raises ValueError if `text` is not one of this form."""
    try:
        content = json.loads(text)
        if content["form"] != FORM:
            raise ValueError(f"form {content['form']}")
        meshes = [Mesh(tuple(r), tuple(s), tuple(names)) for r, s, names in content["meshes"]]
        layouts = [
            Layout(meshes[mesh], tuple(Split(*split) for split in splits))
            for mesh, splits in content["layouts"]
        ]
        buckets = tuple(
            Bucket(
                tuple(_read(matrix, layouts) for matrix, _ in members),
                tuple(int(owner) for _, owner in members),
                bool(repeated),
            )
            for repeated, members in content["buckets"]
        )
        return Plan(buckets, content["exchange"], content["settings"], content["overlap"])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"this is no plan: {type(error).__name__}: {error}") from error


def _matrix(matrix: Matrix, layout: int) -> dict[str, Any]:
    cut = matrix.cut
    return {
        **{key: value for key, value in vars(matrix).items() if key in _PLAIN},
        "layout": layout,
        "cut": [cut.shape, cut.expert, cut.part, cut.transposed, cut.flatten, cut.columns],
        "panel": matrix.panel,
    }


_PLAIN = (
    "id",
    "wire_dtype",
    "wire_bytes",
    "cost",
    "settings",
    "row_stats",
    "method",
    "segments",
    "may_share",
)


def _read(content: dict[str, Any], layouts: list[Layout]) -> Matrix:
    shape, expert, part, transposed, flatten, columns = content.pop("cut")
    cut = Cut(tuple(shape), expert, _range(part), transposed, flatten, _range(columns))
    layout = layouts[content.pop("layout")]
    segments = tuple(content.pop("segments"))
    panel = content.pop("panel")
    panel = None if panel is None else Panel(*panel)
    return Matrix(cut=cut, layout=layout, segments=segments, panel=panel, **content)


def _range(ends: list[int] | None) -> tuple[int, int] | None:
    return None if ends is None else (ends[0], ends[1])
