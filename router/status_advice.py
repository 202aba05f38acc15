"""What to do when something is wrong: findings in plain words from what `/status` holds.

Pure, and without knowledge of its own: every rule reads the typed body that is about to be sent, so
the page, `curl` and a test see the same. The worst come first; an empty list says that all is well. What
the watch over the pair found is handed on in its own words; its notes are left to `crossover doctor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Literal

from router.admin_models import AdviceItem, BackendItem, Status
from router.load import Role

Severity = Literal["wrong", "warning", "note"]
Rule = Callable[[Status], Iterator[AdviceItem]]

ORDER: Final[tuple[Severity, ...]] = ("wrong", "warning", "note")
PLAIN: Final = frozenset({"speculative", "baseline", "least-in-flight", "round-robin"})
QUIET: Final[frozenset[str]] = frozenset({"note"})  # severities of the pair that are not shown


def advise(status: Status) -> list[AdviceItem]:
    """Everything that is not as it should be, the worst first."""
    found = [item for rule in RULES for item in rule(status)]
    found.sort(key=lambda item: ORDER.index(item.severity))
    return found


def _say(
    code: str, severity: Severity, seen: str, mend: str, backend: Role | None = None
) -> AdviceItem:
    return AdviceItem(code=code, severity=severity, backend=backend, seen=seen, mend=mend)


def _pair_flags(status: Status) -> str:
    """The two flags that name the pair, with the addresses that this router uses."""
    return " ".join(f"--{each.role.value} {each.url}" for each in status.backends)


def _router(status: Status) -> Iterator[AdviceItem]:
    if status.draining:
        seen = "this router is shutting down: what runs may finish, nothing new should be sent here"
        yield _say("draining", "warning", seen, "nothing to mend; send new work elsewhere")
    elif not any(each.usable for each in status.backends):
        seen = "no backend takes work: every request is answered with 503"
        yield _say("no_backend", "wrong", seen, "bring one back: the findings below say how")
    queue = status.queue
    if queue.waiting:
        seen = (
            f"{queue.waiting} requests wait in the router: {queue.in_flight} of"
            f" {queue.max_in_flight} places are taken"
        )
        mend = "raise --max-in-flight if the servers can take more; otherwise they are full"
        yield _say("queue", "warning", seen, mend)


def _health(status: Status) -> Iterator[AdviceItem]:
    for each in status.backends:
        role = each.role.value
        if each.health == "down":
            seen = (
                f"the {role} server does not answer at {each.url}; its work goes to the other one"
            )
            mend = (
                f"look at its log and start it again; curl {each.url}/health must say 200. It is"
                " used again by itself as soon as it answers"
            )
            yield _say("down", "wrong", seen, mend, each.role)
        elif each.health == "unknown":
            seen = f"the {role} server has not answered a probe yet"
            mend = "wait while it loads its model; then see that its address is right"
            yield _say("unknown", "note", f"{seen} at {each.url}", mend, each.role)
        if each.breaker != "closed" and each.health != "down":
            yield _breaker(each)
        if each.drained:
            mend = f"POST /backends/{role}/enable with the admin key, or the button on this page"
            seen = f"an operator took the {role} server out of use"
            yield _say("drained", "warning", seen, mend, each.role)


def _breaker(each: BackendItem) -> AdviceItem:
    role = each.role.value
    state = "is tried again" if each.breaker == "half_open" else "is left alone for a while"
    return _say(
        "breaker",
        "wrong" if each.breaker == "open" else "warning",
        f"the {role} server {state}: {each.failures} requests in a row failed there",
        f"look at its log for the first error; curl {each.url}/v1/models should answer",
        each.role,
    )


def _load(status: Status) -> Iterator[AdviceItem]:
    kv_mark = status.settings.get("kv_mark")
    for each in status.backends:
        role, told = each.role.value, each.telemetry
        if each.health == "down":
            continue
        if told is None or not told.fresh:
            if each.health == "up":
                seen = (
                    f"the load of the {role} server is not known: only this router's own requests"
                    " are counted"
                )
                mend = (
                    f"curl {each.url}/v1/loads must answer; else start the server with"
                    " --enable-metrics, and check --backend-api-key"
                )
                yield _say("telemetry", "warning", seen, mend, each.role)
            continue
        if told.queued:
            seen = f"{told.queued} requests wait inside the {role} server, beside {told.running} that run"
            mend = "raise its --max-running-requests (and its KV cache), or lower --threshold"
            yield _say("queued", "warning", seen, mend, each.role)
        usage = told.token_usage
        if usage is not None and isinstance(kv_mark, float) and usage > kv_mark:
            seen = f"the KV cache of the {role} server is {usage:.0%} full"
            mend = "raise its --mem-fraction-static, or send fewer and shorter prompts"
            yield _say("kv_cache", "warning", seen, mend, each.role)
        if each.contended:
            seen = f"the {role} server refused work (429 or 503) a moment ago, or says nothing"
            mend = "raise its --max-queued-requests, or add a server; see whether its process hangs"
            yield _say("contended", "warning", seen, mend, each.role)
        if each.foreign:
            seen = f"{each.foreign} requests of other clients run on the {role} server"
            mend = "send all clients through this router, so that each is counted at once"
            yield _say("foreign", "note", seen, mend, each.role)


def _pair(status: Status) -> Iterator[AdviceItem]:
    pair = status.pair
    if pair is None:
        return
    for each in pair.findings:
        if each.severity in QUIET:
            continue
        severity: Severity = "wrong" if each.severity == "spoils" else "warning"
        seen = f"{each.rule}: {each.seen} ({each.why})"
        yield _say(f"pair:{each.rule}", severity, seen, each.mend, each.backend)
    if pair.alarm is not None and pair.speculation != "lost":
        seen = f"speculation was lost and has not been seen back: {pair.alarm}"
        mend = f"crossover doctor {_pair_flags(status)}"
        yield _say("speculation", "wrong", seen, mend, Role.SPECULATIVE)
    if all(each.health == "up" for each in status.backends):
        for reason in pair.unknown:
            mend = "check --backend-api-key; /server_info must answer in 10 s"
            yield _say("unasked", "warning", f"the pair cannot be looked at: {reason}", mend)


def _calibration(status: Status) -> Iterator[AdviceItem]:
    found = status.calibration
    if found is None:
        return
    again = f"loadtest calibrate {_pair_flags(status)} --out {found.path}"
    if found.problem is not None:
        seen = f"what {found.path} holds now is not in force: {found.problem}"
        yield _say("calibration_file", "wrong", seen, f"mend the file, or make it anew: {again}")
    if found.alarm is not None:
        seen = (
            "the calibration is of another pair, so everything goes to the server that does not"
            f" speculate: {found.alarm}"
        )
        yield _say("calibration_alarm", "wrong", seen, again)
    elif found.advice is not None:
        yield _say("recalibrate", "warning", found.advice.removeprefix("recalibrate: "), again)
    if found.verdict == "unsure":
        seen = "the calibration is not sure where the curves cross"
        mend = f"loadtest report {found.path} says what would settle it; then {again}"
        yield _say("unsure", "warning", seen, mend)


def _policy(status: Status) -> Iterator[AdviceItem]:
    name, asked = status.policy.name, str(status.settings.get("policy"))
    # "frontier" has other names too: that of a calibration's rule, and that of the server that does
    # not speculate, to which the watch sends everything while the line is not trusted.
    ours = asked == "frontier" and (status.policy.configured or name not in PLAIN)
    if name != asked and not ours:
        seen = f"the policy in force is {name}, the configured one {asked}: an operator changed it"
        mend = f'POST /policy with {{"policy": "{asked}"}} and the admin key, or restart'
        yield _say("policy", "note", seen, mend)


RULES: Final[tuple[Rule, ...]] = (_router, _health, _load, _pair, _calibration, _policy)
