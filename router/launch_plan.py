"""What `crossover launch` will start: from what is wanted and the GPUs seen to two command lines.

The law of this file: values in, values out. It reads no file, asks no GPU and starts nothing; what
it cannot do well it says in `words`, one line each, for the user.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from router.launch_flags import Flags, filled, from_args, merged, to_args, value_of
from router.launch_gpu_facts import GIB, Gpu, Machine, fractions, recipe, sm, tensor_parallel
from router.launch_model import ModelFacts
from router.launch_secrets import PLACEHOLDER, hidden, secrets_in
from router.load import ROLES, Role

# SGLang's own way in, in every release that we know.
SGLANG: Final = ("-m", "sglang.launch_server")
# Spec V2 is off by default up to 0.5.9 or a little later, on by 0.5.12, and always on from 0.5.14.
SPEC_V2: Final = "SGLANG_ENABLE_SPEC_V2"
SPEC_V2_DEFAULT_SINCE: Final = (0, 5, 12)
VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
# Speculation without a draft model of its own.
DRAFTLESS: Final = {"NEXTN", "NGRAM"}


class PlanError(ValueError):
    """What is wanted cannot be planned. The text says what, and how to mend it."""


class NoGpuError(PlanError):
    """There is no GPU, or there are too few."""


class Share(enum.StrEnum):
    """Where the two servers run."""

    SHARED = "shared"  # both on the same GPUs
    SPLIT = "split"  # each on GPUs of its own


class Extra(msgspec.Struct, frozen=True):
    """What a user adds to one server, or to both."""

    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    without: tuple[str, ...] = ()  # flags that are taken out again


class Address(msgspec.Struct, frozen=True):
    """Where a server listens."""

    host: str
    port: int


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is asked for. `base` holds the flags of deploy/sglang/."""

    model: str
    draft: str | None
    addresses: Mapping[Role, Address]
    base: Mapping[Role, Flags]
    share: Share | None = None  # None: shared on one GPU, split on more
    tensor_parallel: int | None = None
    python: str = "python"
    server_command: tuple[str, ...] | None = None
    both: Extra = Extra()
    each: Mapping[Role, Extra] = {}
    secret_files: Mapping[Role, str]


class ServerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one server is started. `beside` is the command while the other server is up.

    `secret` is what stands in the server's file of secrets; None: it needs no such file.
    """

    role: Role
    address: Address
    command: tuple[str, ...]
    beside: tuple[str, ...]
    env: dict[str, str]
    secret: Flags | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Both servers, the first to be started first."""

    servers: tuple[ServerPlan, ServerPlan]
    at_once: bool  # whether they may start at the same moment
    share: Share
    words: tuple[str, ...] = ()


class _Layout(msgspec.Struct, frozen=True):
    share: Share
    gpus: Mapping[Role, tuple[Gpu, ...]]
    words: tuple[str, ...]


def needs_gpus(server_command: Sequence[str] | None) -> bool:
    """Whether the command lines depend on the GPUs of this host."""
    if server_command is None:
        return True
    text = " ".join(server_command)
    return any(word in text for word in ("{args}", "{gpus}", "{tp}"))


def plan(wanted: Wanted, machine: Machine, facts: ModelFacts | None) -> Plan:
    """Return what to start, and in which order.

    `facts` is what is known of the model, None where its files are not on this host. Raises
    PlanError, NoGpuError where GPUs are missing, FlagError for arguments that are not flags.
    """
    if not needs_gpus(wanted.server_command):
        return _without_gpus(wanted)
    layout = _lay_out(wanted, machine, facts)
    used = {gpu.index: gpu for gpus in layout.gpus.values() for gpu in gpus}
    advice, words = recipe(tuple(used.values()), facts)
    flags = {role: _flags(wanted, role, layout, advice) for role in ROLES}
    fixed = all("max-total-tokens" in flags[role] for role in ROLES)
    alone = beside = flags
    if layout.share is Share.SHARED and not fixed:
        first, second = fractions(min(used.values(), key=lambda gpu: gpu.free))
        alone = {role: _sized(flags[role], first) for role in ROLES}
        beside = {role: _sized(flags[role], second) for role in ROLES}
        words += (
            (
                f"one after the other on the same GPUs: the first may hold {first:.1%} of what is free "
                f"then, the second {second:.1%}; with --max-total-tokens on both they start at once"
            ),
            *(
                f"the {role} server keeps its own --mem-fraction-static, of what is free then"
                for role in ROLES
                if "mem-fraction-static" in flags[role]
            ),
        )
    servers = tuple(
        ServerPlan(
            role=role,
            address=wanted.addresses[role],
            command=_command(wanted, role, alone[role], layout, machine),
            beside=_command(wanted, role, beside[role], layout, machine),
            env=_env(wanted, role, layout, machine),
            secret=_secret(wanted, role),
        )
        for role in ROLES
    )
    return Plan(
        servers=(servers[0], servers[1]),
        at_once=layout.share is Share.SPLIT or fixed,
        share=layout.share,
        words=layout.words + words,
    )


def _without_gpus(wanted: Wanted) -> Plan:
    servers = tuple(
        ServerPlan(
            role=role,
            address=wanted.addresses[role],
            command=(command := _filled(wanted, role)),
            beside=command,
            env={**wanted.both.env, **wanted.each.get(role, Extra()).env},
            secret=_secret(wanted, role),
        )
        for role in ROLES
    )
    share = wanted.share or Share.SHARED
    return Plan(servers=(servers[0], servers[1]), at_once=True, share=share)


def _lay_out(wanted: Wanted, machine: Machine, facts: ModelFacts | None) -> _Layout:
    """Which server gets which GPUs."""
    gpus = machine.gpus
    if not gpus:
        raise NoGpuError("no GPU is seen on this host")
    share = wanted.share or (Share.SHARED if len(gpus) == 1 else Share.SPLIT)
    if share is Share.SPLIT and len(gpus) < 2:
        text = "a GPU for each server wants two, and one is seen: use --gpus shared"
        raise NoGpuError(text)
    room = len(gpus) if share is Share.SHARED else len(gpus) // 2
    size = wanted.tensor_parallel or tensor_parallel(room, facts)
    if size > room:
        text = (
            f"--tensor-parallel-size {size} wants more GPUs for a server than the {room} there are"
        )
        raise NoGpuError(text)
    words = [_seen(machine, share, size)]
    if share is Share.SHARED:
        mine, theirs = gpus[:size], gpus[:size]
    else:
        mine, theirs = gpus[:size], gpus[size : 2 * size]
    unused = len(gpus) - len({*mine, *theirs})
    if unused:
        words.append(f"{unused} of {len(gpus)} GPUs stay unused: each server takes {size}")
    return _Layout(share, {Role.SPECULATIVE: mine, Role.BASELINE: theirs}, tuple(words))


def _seen(machine: Machine, share: Share, size: int) -> str:
    """What was found, and what becomes of it, in one line."""
    kinds: dict[str, int] = {}
    for gpu in machine.gpus:
        kind = f"{gpu.name} (SM{sm(gpu)}, {gpu.total / GIB:.0f} GiB)"
        kinds[kind] = kinds.get(kind, 0) + 1
    found = " and ".join(f"{count} x {kind}" for kind, count in kinds.items())
    each = "1 GPU" if size == 1 else f"{size} GPUs"
    where = "both servers on the same" if share is Share.SHARED else "each server on its own"
    engine = f", SGLang {machine.sglang}" if machine.sglang else ""
    return f"{found}{engine}: {where} {each}"


def _flags(wanted: Wanted, role: Role, layout: _Layout, advice: Flags) -> Flags:
    """All flags of one server but its memory fraction."""
    address, size = wanted.addresses[role], len(layout.gpus[role])
    own: Flags = {"model-path": (wanted.model,)}
    own |= {"host": (address.host,), "port": (str(address.port),)}
    if size > 1:
        own["tensor-parallel-size"] = (str(size),)
    added, without = _added(wanted, role)
    if not {"host", "port"}.isdisjoint(added):
        text = f"give the {role} server's address as --{role} http://HOST:PORT, not in its args"
        raise PlanError(text)
    base = dict(wanted.base[role])
    algorithm = value_of({**base, **added}, "speculative-algorithm")
    if role is Role.SPECULATIVE and "speculative-draft-model-path" not in added:
        if wanted.draft is not None:
            base["speculative-draft-model-path"] = (wanted.draft,)
        elif (algorithm or "").upper() not in DRAFTLESS:
            raise PlanError(f"{algorithm or 'speculation'} wants a draft model: give --draft")
    flags = merged(own, base, advice, added, without=without)
    return hidden(flags, wanted.secret_files[role])


def _added(wanted: Wanted, role: Role) -> tuple[Flags, tuple[str, ...]]:
    """What the user adds to one server, and takes out."""
    extra = wanted.each.get(role, Extra())
    added = merged(from_args(wanted.both.args), from_args(extra.args))
    return added, (*wanted.both.without, *extra.without)


def _secret(wanted: Wanted, role: Role) -> Flags | None:
    added, without = _added(wanted, role)
    found = secrets_in(merged(added, without=without))
    return found if found or PLACEHOLDER in " ".join(wanted.server_command or ()) else None


def _sized(flags: Flags, fraction: float) -> Flags:
    """With this share of the free memory, unless the user has said another."""
    if "mem-fraction-static" in flags:
        return flags
    return {**flags, "mem-fraction-static": (f"{fraction:.3f}",)}


def _command(
    wanted: Wanted, role: Role, flags: Flags, layout: _Layout, machine: Machine
) -> tuple[str, ...]:
    if wanted.server_command is not None:
        return _filled(wanted, role, flags, layout.gpus[role], machine)
    return (wanted.python, *SGLANG, *to_args(flags, machine.release))


def _filled(
    wanted: Wanted,
    role: Role,
    flags: Flags | None = None,
    gpus: Sequence[Gpu] = (),
    machine: Machine | None = None,
) -> tuple[str, ...]:
    """The user's own command with its placeholders filled in."""
    address = wanted.addresses[role]
    args = () if machine is None else to_args(flags or {}, machine.release)
    values = {
        "{role}": role.value,
        "{host}": address.host,
        "{port}": str(address.port),
        "{model}": wanted.model,
        "{draft}": wanted.draft or "",
        "{gpus}": ",".join(gpu.token for gpu in gpus),
        "{tp}": str(len(gpus) or 1),
        PLACEHOLDER: wanted.secret_files[role],
    }
    return filled(wanted.server_command or (), values, args)


def _env(wanted: Wanted, role: Role, layout: _Layout, machine: Machine) -> dict[str, str]:
    """The variables of one server: a default of ours, the user's, and which GPUs are its own."""
    old = machine.release is not None and machine.release < SPEC_V2_DEFAULT_SINCE
    env = {SPEC_V2: "1"} if old and role is Role.SPECULATIVE else {}
    env |= wanted.both.env
    mine = layout.gpus[role]
    if len(mine) < len(machine.gpus):
        # A user's CUDA_VISIBLE_DEVICES for both is what was divided between them.
        env[VISIBLE] = ",".join(gpu.token for gpu in mine)
    return env | wanted.each.get(role, Extra()).env
