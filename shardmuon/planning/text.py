"""Plans as JSON, exactly: what was dumped is loaded as an equal plan with an equal digest.

Owns the form, and that nothing else is believed. Torch-free, so that a plan can be looked at, kept
and compared anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, get_args

from shardmuon.limits import Method, show
from shardmuon.planning.cut import Cut
from shardmuon.planning.layout import Layout, Mesh, Split
from shardmuon.planning.matrix import ROW_STAT_BYTES, Matrix, Panel
from shardmuon.planning.plan import Bucket, Plan
from shardmuon.runtime import Exchange, Overlap

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
        meshes = [
            Mesh(_integers(ranks), _integers(shape), tuple(map(_text, names)))
            for ranks, shape, names in content["meshes"]
        ]
        layouts = [
            Layout(meshes[_index(mesh, meshes)], tuple(Split(*_integers(s)) for s in splits))
            for mesh, splits in content["layouts"]
        ]
        buckets = tuple(
            Bucket(
                tuple(_read(matrix, layouts) for matrix, _ in members),
                tuple(_integer(owner) for _, owner in members),
                _bool(repeated),
            )
            for repeated, members in content["buckets"]
        )
        return Plan(
            buckets,
            _choice(content["exchange"], get_args(Exchange)),
            _text(content["settings"]),
            _choice(content["overlap"], get_args(Overlap)),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"this is no plan: {type(error).__name__}: {error}") from error
    except RecursionError:
        raise ValueError("this is no plan: it is nested too deeply") from None


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
    "row_state",
    "row_stats",
    "method",
    "segments",
    "may_share",
)


def _read(content: dict[str, Any], layouts: list[Layout]) -> Matrix:
    if content.keys() != {*_PLAIN, "layout", "cut", "panel"}:
        raise ValueError(f"a matrix has the keys {sorted(content)}")
    layout = layouts[_index(content["layout"], layouts)]
    cut = _cut(content["cut"])
    dims = 2 if cut.flatten else len(cut.shape)
    if any(not 0 <= split.dim < dims for split in layout.splits):
        raise ValueError(f"{layout.splits} cannot split a parameter of shape {cut.shape}")
    wire_bytes = _integer(content["wire_bytes"])
    if not 1 <= wire_bytes <= ROW_STAT_BYTES * 2:
        raise ValueError(f"an element has {wire_bytes} wire bytes")
    return Matrix(
        id=_text(content["id"]),
        cut=cut,
        layout=layout,
        wire_dtype=_text(content["wire_dtype"]),
        wire_bytes=wire_bytes,
        cost=_integer(content["cost"]),
        settings=_text(content["settings"]),
        row_state=_bool(content["row_state"]),
        row_stats=_bool(content["row_stats"]),
        method=_choice(content["method"], get_args(Method)),
        segments=_integers(content["segments"]),
        may_share=_bool(content["may_share"]),
        panel=_panel(content["panel"]),
    )


def _cut(content: list[Any]) -> Cut:
    shape, expert, part, transposed, flatten, columns = content
    cut = Cut(
        _integers(shape),
        None if expert is None else _integer(expert),
        _range(part),
        _bool(transposed),
        _bool(flatten),
        _range(columns),
    )
    dims = len(cut.shape)
    stacked = cut.expert is not None and dims == 3 and cut.expert < cut.shape[0]
    if not (stacked or (cut.expert is None and (dims >= 3 if cut.flatten else dims == 2))):
        raise ValueError(f"no matrix lies in shape {cut.shape} at expert {cut.expert}")
    whole = Cut(cut.shape, cut.expert, None, cut.transposed, cut.flatten)
    for (start, stop), length in ((cut.part_rows, whole.rows), (cut.part_cols, whole.cols)):
        if not start <= stop <= length:
            raise ValueError(f"rows or columns {start} to {stop} are not among {length}")
    return cut


def _panel(content: list[Any] | None) -> Panel | None:
    return None if content is None else Panel(_text(content[0]), *_integers(content[1:]))


def _range(ends: list[Any] | None) -> tuple[int, int] | None:
    if ends is None:
        return None
    start, stop = _integers(ends)
    return start, stop


def _integer(value: object) -> int:
    """A count, a rank, a size or a cost: none is negative, and all are numbers of 63 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"expected a whole number in [0, 2^63), got {show(value)}")
    return value


def _integers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list, got {show(values)}")
    return tuple(map(_integer, values))


def _index(value: object, among: Sequence[object]) -> int:
    index = _integer(value)
    if index >= len(among):
        raise ValueError(f"{index} is none of {len(among)}")
    return index


def _bool(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {show(value)}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {show(value)}")
    return value


def _choice(value: object, among: Sequence[str]) -> str:
    if value not in among:
        raise ValueError(f"expected one of {', '.join(among)}, got {show(value)}")
    return _text(value)
