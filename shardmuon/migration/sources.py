"""One function per implementation: its arguments and defaults, as they are written there.

Facts are from the files named in each docstring, read in 2026. An argument that is not listed here
is one that cannot be mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardmuon.groups import ADAMW
from shardmuon.limits import advice, show
from shardmuon.migration.settings import Migration, Scale
from shardmuon.orthogonalize.coefficients import KELLER, Coefficients, Triple

__all__ = [
    "from_dion",
    "from_emerging_optimizers",
    "from_keller",
    "from_megatron",
    "from_moonlight",
    "from_torch",
    "keller_groups",
]

_SUM_NOTE = (
    "its momentum buffer is a sum, ours an average: the same directions while momentum stays"
    " constant, other ones where momentum is warmed up"
)
_EPS_NOTE = "it divides by norm + eps, we by max(norm, eps): other updates only for norms near eps"
_DECAY_NOTE = "it decays vectors too; param_groups sets weight_decay=0 for them"


def from_torch(  # noqa: PLR0913  (its arguments)
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_coefficients: Triple = KELLER,
    eps: float = 1e-7,
    ns_steps: int = 5,
    adjust_lr_fn: str | None = None,
) -> Migration:
    """`torch.optim.Muon` (torch/optim/_muon.py): the same names, and bfloat16 on CPUs too."""
    if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"adjust_lr_fn of torch.optim.Muon cannot be {show(adjust_lr_fn)}")
    scale = Scale("rms", 0.2) if adjust_lr_fn == "match_rms_adamw" else Scale("original")
    keys = _keys(lr, weight_decay, momentum, nesterov, eps)
    keys |= {"ns_steps": ns_steps, "ns_coefficients": ns_coefficients}
    return Migration(source="torch.optim.Muon", keys=keys, adamw={}, scale=scale)


def from_keller(
    lr: float = 0.02,
    weight_decay: float = 0.0,
    momentum: float = 0.95,
    *,
    nesterov: bool = True,
    ns_steps: int = 5,
    sum_momentum: bool = False,
    adam: Mapping[str, Any] | None = None,
) -> Migration:
    """Keller Jordan's `Muon` and `SingleDeviceMuon` (KellerJordan/Muon, muon.py).

    nesterov, ns_steps: fixed in its classes, arguments of `muon_update`. sum_momentum: for the
    versions and copies with `buf.mul_(momentum).add_(g)` and `g.add(buf, alpha=momentum)`.
    adam: a group of its aux Adam: lr, betas, eps, weight_decay.
    """
    theirs = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    adamw = {**theirs, **(adam or {})}
    _refuse_unknown("adam", adamw, theirs)
    keys = _keys(lr, weight_decay, momentum, nesterov, 1e-7, sums=sum_momentum)
    keys |= {"ns_steps": ns_steps, "ns_coefficients": KELLER}
    return Migration(
        source="Keller Jordan's Muon",
        keys=keys,
        adamw=adamw,
        scale=Scale("kernel"),
        sums=sum_momentum,
        notes=(
            *((_SUM_NOTE,) if sum_momentum else ()),
            _EPS_NOTE,
            "a missing gradient counts as zeros there: Runtime(missing_grad='zero')",
            "convolutions of 4 dims are flattened there: flatten=True in a group of their own",
        ),
    )


def keller_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of `MuonWithAuxAdam`, which carry `use_muon`, as groups of ours. Changes nothing."""
    made: list[dict[str, Any]] = []
    for group in groups:
        if "use_muon" not in group or "params" not in group:
            raise ValueError(
                f"a group of MuonWithAuxAdam has use_muon and params, got {show(group)}"
            )
        settings = {k: v for k, v in group.items() if k not in ("params", "use_muon")}
        members = {"params": group["params"]}
        if group["use_muon"]:
            _refuse_unknown("a group", settings, ("lr", "momentum", "weight_decay"))
            made += from_keller(**settings).groups([members])
        else:
            made += from_keller(adam=settings).groups([{**members, "algorithm": ADAMW}])
    return made


def from_moonlight(
    lr: float = 1e-3,
    wd: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
) -> Migration:
    """Moonlight's `Muon` (MoonshotAI/Moonlight, examples/toy_train.py)."""
    keys = _keys(lr, wd, momentum, nesterov, 1e-7, sums=True)
    keys |= {"ns_steps": ns_steps, "ns_coefficients": KELLER}
    return Migration(
        source="Moonlight's Muon",
        keys=keys,
        adamw={"lr": lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": wd},
        scale=Scale("rms", 0.2),
        sums=True,
        notes=(
            _SUM_NOTE,
            _EPS_NOTE,
            _DECAY_NOTE,
            "its AdamW adds eps before the bias correction: there eps is larger in the first steps,"
            " by 1 / sqrt(1 - beta2^step)",
        ),
    )


def from_dion(  # noqa: PLR0913  (its arguments)
    lr: float = 0.01,
    mu: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.01,
    cautious_wd: bool = False,
    epsilon: float = 1e-8,
    nesterov: bool = False,
    adjust_lr: str | None = "spectral_norm",
    use_polar_express: bool = True,
    rest: str = "adamw",
) -> Migration:
    """`dion.Muon` (microsoft/dion, muon.py, megabatch_base.py, scalar_opts.py, polar_express.py).

    cautious_wd: the same mask as ours, for matrices and under AdamW (scalar_opts.py); refused with
    Lion, which has no such key here.
    use_polar_express: False also for versions without this argument. rest: `algorithm` of its
    groups that are not "muon": "adamw" or "lion". newton_schulz_func and use_gram_newton_schulz
    cannot be mapped; use_triton has no meaning here.
    """
    scales = {"spectral_norm": Scale("spectral"), "rms_norm": Scale("rms", 0.2), None: Scale("one")}
    if adjust_lr not in scales:
        raise ValueError(f"adjust_lr must be one of {list(scales)}, got {show(adjust_lr)}")
    keys = _keys(lr, weight_decay, mu, nesterov, epsilon, sums=True)
    keys["ns_coefficients"] = "polar_express" if use_polar_express else "you"
    decay = {"weight_decay": weight_decay, "cautious_weight_decay": cautious_wd}
    kinds = {ADAMW: {**decay, "eps": epsilon}, "lion": {"algorithm": "lion"}}
    others = {
        "lr": lr,
        "betas": betas,
        "weight_decay": weight_decay,
        **_choice("rest", rest, kinds),
    }
    if cautious_wd and rest == "lion":
        raise ValueError("cautious_wd=True cannot be mapped with rest='lion'")
    return Migration(
        source="dion.Muon",
        keys={**keys, **decay, "ns_steps": 5},
        adamw=others,
        scale=scales[adjust_lr],
        sums=True,
        notes=(
            _SUM_NOTE,
            _EPS_NOTE,
            _DECAY_NOTE,
            "distributed_mesh: DTensors bring their mesh; DDP's process group is Muon(mesh=...)",
            "flatten: a key of groups of convolutions",
        ),
    )


def from_emerging_optimizers(  # noqa: PLR0913  (its arguments)
    lr: float = 3e-4,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    nesterov: bool = False,
    weight_decay_method: str = "decoupled",
    fp32_matmul_prec: str = "medium",
    coefficient_type: str = "quintic",
    num_ns_steps: int = 5,
    scale_mode: str = "spectral",
    extra_scale_factor: float = 1.0,
) -> Migration:
    """`Muon` of NVIDIA's Emerging Optimizers (NVIDIA-NeMo/Emerging-Optimizers).

    From emerging_optimizers/orthogonalized_optimizers/muon.py, muon_utils.py and
    orthogonalized_optimizer.py. Its kernel choice, use_syrk, has no meaning here.
    """
    if weight_decay and weight_decay_method != "decoupled":
        raise ValueError(
            f"weight_decay_method={show(weight_decay_method)} cannot be mapped: our decay is lr x"
            " weight_decay. For 'independent' at a constant lr, weight_decay / lr is the same"
        )
    modes = {"spectral": "rms", "unit_rms_norm": "spectral", "shape_scaling": "original"}
    dtypes = {"medium": torch.bfloat16, "high": torch.float32, "highest": torch.float32}
    if not extra_scale_factor > 0:
        raise ValueError(f"extra_scale_factor must be above 0, got {show(extra_scale_factor)}")
    keys = _keys(lr, weight_decay, momentum, nesterov, 1e-7)
    keys |= {
        "ns_steps": num_ns_steps,
        "ns_coefficients": _nvidia_coefficients(coefficient_type, num_ns_steps),
        "ns_dtype": _choice("fp32_matmul_prec", fp32_matmul_prec, dtypes),
    }
    return Migration(
        source="Emerging Optimizers' Muon",
        keys=keys,
        adamw={},
        scale=Scale(_choice("scale_mode", scale_mode, modes), extra_scale_factor),
        notes=("'high' is TF32 there; here torch.set_float32_matmul_precision says so",),
    )


def from_megatron(  # noqa: PLR0913  (its arguments)
    lr: float,
    weight_decay: float = 0.01,
    *,
    muon_momentum: float = 0.95,
    muon_nesterov: bool = False,
    muon_scale_mode: str = "spectral",
    muon_extra_scale_factor: float = 1.0,
    muon_fp32_matmul_prec: str = "medium",
    muon_coefficient_type: str = "quintic",
    muon_num_ns_steps: int = 5,
    muon_tp_mode: str = "blockwise",
    muon_split_qkv: bool = True,
    tensor_model_parallel_size: int = 1,
    decoupled_weight_decay: bool = True,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    adam_eps: float = 1e-8,
) -> Migration:
    """Megatron-LM's Muon (NVIDIA/Megatron-LM, optimizer_config.py and muon.py of core/optimizer).

    muon_nesterov is `muon_use_nesterov` in older versions. The arithmetic is that of Emerging
    Optimizers. muon_tp_mode "blockwise" orthogonalizes each rank's block of a matrix on its own,
    which has no equal here where tensor_model_parallel_size is above 1.
    """
    _choice("muon_tp_mode", muon_tp_mode, dict.fromkeys(("blockwise", "duplicated", "distributed")))
    if muon_tp_mode == "blockwise" and tensor_model_parallel_size > 1:
        raise ValueError(
            "muon_tp_mode='blockwise' cannot be mapped with tensor parallelism: it orthogonalizes"
            " blocks, we whole matrices, as 'duplicated' and 'distributed' do"
        )
    if weight_decay and not decoupled_weight_decay:
        raise ValueError("decoupled_weight_decay=False cannot be mapped: our decay is decoupled")
    base = from_emerging_optimizers(
        lr,
        muon_momentum,
        weight_decay,
        nesterov=muon_nesterov,
        fp32_matmul_prec=muon_fp32_matmul_prec,
        coefficient_type=muon_coefficient_type,
        num_ns_steps=muon_num_ns_steps,
        scale_mode=muon_scale_mode,
        extra_scale_factor=muon_extra_scale_factor,
    )
    betas = (adam_beta1, adam_beta2)
    return Migration(
        source="Megatron's Muon",
        keys=base.keys,
        adamw={"lr": lr, "betas": betas, "eps": adam_eps, "weight_decay": weight_decay},
        scale=base.scale,
        notes=(*base.notes, _QKV_NOTES[muon_split_qkv]),
    )


_QKV_NOTES = {
    True: (
        "muon_split_qkv=True: q, k and v are a matrix each. So they are here if they are parameters"
        " of their own, or blocks of rows with split_sizes; Megatron's fused weight, where rows of"
        " q, k and v alternate by query group, has no equal"
    ),
    False: "muon_split_qkv=False: a fused qkv weight is one matrix; so it is here by default",
}


def _keys(
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    eps: float,
    sums: bool = False,
) -> dict[str, Any]:
    """Keys of a muon group. All sources iterate in bfloat16, on CPUs too.

    sums: the matrix to orthogonalize is 1 / (1 - momentum) times ours, and so is a norm of eps.
    """
    return {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "eps": eps * (1 - momentum) if sums else eps,
        "ns_dtype": torch.bfloat16,
    }


# Numbers of NVIDIA's muon_utils.py. Its "simple" is keller, its "quintic" is you; its polar_express
# is another table than our preset of that name, with rounded numbers and for eight steps.
_NVIDIA_TABLES: dict[str, tuple[Triple, ...]] = {
    "simple": (KELLER,),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    "cans": (
        (8.4703, -25.1081, 18.6293),
        (4.1828, -3.1087, 0.5806),
        (3.9619, -2.9541, 0.5630),
        (3.2866, -2.4647, 0.5074),
        (2.2737, -1.6447, 0.4162),
    ),
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}


def _nvidia_coefficients(name: str, steps: int) -> Coefficients:
    """The triple of each step: tables start anew, or repeat their last triple."""
    table = _choice("coefficient_type", name, _NVIDIA_TABLES)
    if name == "simple":
        return KELLER
    if name == "quintic" and steps <= len(table):
        return "you"
    repeats = name in ("polar_express", "cans")
    last = len(table) - 1
    return [table[min(i, last) if repeats else i % len(table)] for i in range(steps)]


def _choice(argument: str, value: str, choices: Mapping[str, Any]) -> Any:
    """What `value` stands for."""
    if value not in choices:
        raise ValueError(
            f"{argument} must be one of {', '.join(choices)}, got {show(value)}"
            f"{advice(value, choices)}"
        )
    return choices[value]


def _refuse_unknown(what: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"{what} has the key {show(key)}, which cannot be mapped")
