"""Is speculation really on where it should be, and off where it should not be? One rule each.

The law of this file: facts in, spots out; nothing is fetched. What SGLang does in which version was
read from its wheels of 0.5.9 to 0.5.23 and seen on 0.5.17:

* up to 0.5.12 the overlapped scheduler works with topk 1 only: 0.5.12 gives overlap up with one
  line in its log, 0.5.9 refuses it or, when topk is chosen after the check, breaks;
* `SGLANG_ENABLE_SPEC_V2` switches it to 0.5.13 (default off in 0.5.9, on in 0.5.12); from 0.5.14 on
  it does nothing;
* adaptive speculation with a topk above 1 falls back to the static kind with one line in the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from router.doctor_facts import NONE, OFF, Pair, ServerFacts
from router.doctor_findings import Group, Rule, Severity, Spot
from router.load import Role

LAST_NEEDING_TOPK_1: Final = (0, 5, 12)
LAST_READING_SPEC_V2: Final = (0, 5, 13)
# Fewer tokens per verify step than this are none beyond the token that plain decoding gives: a
# draft head that does not fit gives exactly 1.00, and the ends of requests move the mean a little.
NOTHING_ACCEPTED: Final = 1.05
# Below this a verify step, which costs more than a decode step, hardly pays at any concurrency.
HARDLY_ACCEPTED: Final = 1.3
_NO: Final = {"0", "false", "no", "off", ""}
_SPECULATIVE: Final = (Role.SPECULATIVE,)
_BASELINE: Final = (Role.BASELINE,)
SPOILS, WARNING = Severity.SPOILS, Severity.WARNING


def _off(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.algorithm != OFF:
        return
    seen = "speculative_algorithm is null"
    draft = here.speculative_draft_model_path not in {None, NONE}
    if "speculative-algorithm" in (here.asked or ()) or draft:
        seen += ", though its command line asks for speculation"
    swapped = pair.baseline.speculates
    yield Spot(SPOILS, seen, "the two URLs are the wrong way round: swap them" if swapped else "")


def _overlap(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    if not (here.speculates and here.disable_overlap_schedule):
        return
    seen = f"{here.algorithm} with disable_overlap_schedule true"
    mend = ""
    if here.release and here.release <= LAST_NEEDING_TOPK_1:
        mend = (
            "--speculative-eagle-topk 1 (with --speculative-num-steps and "
            "--speculative-num-draft-tokens), and SGLANG_ENABLE_SPEC_V2=1 in the environment"
        )
    yield Spot(SPOILS, seen, mend)


def _topk_old(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    topk, release = here.speculative_eagle_topk or 0, here.release
    if here.speculates and release and release <= LAST_NEEDING_TOPK_1 and topk > 1:
        yield Spot(SPOILS, f"speculative_eagle_topk {topk} on {here.version}")


def _topk_tree(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    topk, release = here.speculative_eagle_topk or 0, here.release
    eagle = (here.algorithm or "").upper() in {"EAGLE", "EAGLE3", "STANDALONE"}
    if eagle and release and release > LAST_NEEDING_TOPK_1 and topk > 1:
        yield Spot(WARNING, f"speculative_eagle_topk {topk}")


def _spec_v2(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    value = (here.env or {}).get("SGLANG_ENABLE_SPEC_V2")
    if value is None or here.release is None:
        return
    if here.release > LAST_READING_SPEC_V2:
        yield Spot(WARNING, f"SGLANG_ENABLE_SPEC_V2={value} on {here.version}")
    elif value.strip().lower() in _NO:
        mend = "SGLANG_ENABLE_SPEC_V2=1, or an SGLang of 0.5.14 or later"
        yield Spot(SPOILS, f"SGLANG_ENABLE_SPEC_V2={value} on {here.version}", mend)


def _verifies(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    """The canary speaks for itself; without one, the growth of counters."""
    if here.speculates and here.verified is False:
        if here.canary_verify is not None:
            yield Spot(SPOILS, f"0 verify steps for a canary of {here.canary_output} tokens")
        else:
            yield Spot(SPOILS, f"0 verify steps for {here.grown_tokens:.0f} tokens served")


def _accepts(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    length = here.accept_length
    if length is None or not here.speculates:
        return
    if here.speculative_adaptive and here.speculative_num_steps == 0:
        return  # it is switched off for the moment: 1.00 is right
    seen = f"accept length {length:.2f}"
    if length < NOTHING_ACCEPTED:
        yield Spot(SPOILS, seen)
    elif length < HARDLY_ACCEPTED:
        mend = "a draft trained for this model and this traffic, or fewer steps"
        yield Spot(WARNING, seen, mend)


def _head(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    draft = (here.speculative_draft_model_path or "").lower().replace("-", "").replace("_", "")
    if here.algorithm == "EAGLE" and "eagle3" in draft:
        yield Spot(WARNING, f"algorithm EAGLE with {here.speculative_draft_model_path}")


def _adaptive_static(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    asked = "speculative-adaptive" in (here.asked or ())
    config = here.speculative_adaptive_config not in {None, NONE}
    if (asked or config) and here.speculative_adaptive is False:
        topk = here.speculative_eagle_topk
        yield Spot(SPOILS, "speculative_adaptive is false" + (f", topk is {topk}" if topk else ""))


def _adaptive(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.speculative_adaptive:
        steps = here.speculative_num_steps
        now = "" if steps is None else f", {steps} steps now"
        yield Spot(WARNING, "speculative_adaptive is true" + now)


def _simulated(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    value = (here.env or {}).get("SGLANG_SIMULATE_ACC_LEN")
    if value is not None and not value.strip().startswith("-"):
        yield Spot(SPOILS, f"SGLANG_SIMULATE_ACC_LEN={value}")


def _baseline_on(pair: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.speculates:
        swapped = pair.speculative.speculates is False
        mend = "the two URLs are the wrong way round: swap them" if swapped else ""
        yield Spot(SPOILS, f"speculative_algorithm is {here.algorithm}", mend)


def _baseline_verifies(_: Pair, here: ServerFacts) -> Iterator[Spot]:
    if here.verified and not here.speculates:  # where it says so, `_baseline_on` has said it
        steps = here.canary_verify or here.grown_verify or 0
        yield Spot(SPOILS, f"{steps:.0f} verify steps, without an algorithm in its /server_info")


RULES: Final = (
    Rule(
        "speculation-off", Group.SPECULATION, (SPOILS,),
        "that an algorithm was resolved on the speculative server",
        "both servers decode plainly: there is nothing to choose between",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4",
        _off, ("algorithm",), _SPECULATIVE,
    ),
    Rule(
        "overlap-off", Group.SPECULATION, (SPOILS,),
        "that the speculative server kept its overlapped scheduler",
        "drafting and verifying wait for the scheduler in each step, which costs it most when few "
        "requests run; the curve is that of another server than the flags describe",
        "leave out --disable-overlap-schedule (with --device cpu it cannot be had)",
        _overlap, ("algorithm", "disable_overlap_schedule"), _SPECULATIVE,
    ),
    Rule(
        "topk-old", Group.SPECULATION, (SPOILS,),
        "topk 1 on SGLang up to 0.5.12",
        "up to 0.5.12 a topk above 1 gives up the overlapped scheduler, with one line in the log, "
        "or breaks: the trap of the first pair that was measured",
        "--speculative-eagle-topk 1 (with --speculative-num-steps and "
        "--speculative-num-draft-tokens), or SGLang 0.5.13 or later",
        _topk_old, ("algorithm", "release"), _SPECULATIVE,
    ),
    Rule(
        "spec-v2-env", Group.SPECULATION, (SPOILS, WARNING),
        "SGLANG_ENABLE_SPEC_V2, where the server lists its environment",
        "up to 0.5.13 it switches the overlapped worker; since 0.5.14 it does nothing, and who "
        "sets it believes in a switch that is not there",
        "take SGLANG_ENABLE_SPEC_V2 out of the environment; --disable-overlap-schedule is the switch",
        _spec_v2, ("env", "release"), _SPECULATIVE,
    ),
    Rule(
        "verify-count", Group.SPECULATION, (SPOILS,),
        "that verify steps are counted for the canary, or for what was served since the last look",
        "the server says that it speculates and does not",
        "look in its log for `accept len:` in the lines `Decode batch`, and for warnings at its "
        "start; then start it again",
        _verifies, ("algorithm", "verified"), _SPECULATIVE,
    ),
    Rule(
        "accept-length", Group.SPECULATION, (SPOILS, WARNING),
        f"an accept length above {NOTHING_ACCEPTED} (warning below {HARDLY_ACCEPTED})",
        "every draft is thrown away: the server pays for drafting and verifying and gets the one "
        "token that plain decoding gives",
        "a draft that belongs to this model, under the right name: an EAGLE-3 head needs "
        "--speculative-algorithm EAGLE3 (with EAGLE it gives exactly 1.00)",
        _accepts, ("algorithm", "accept_length"), _SPECULATIVE,
    ),
    Rule(
        "topk-tree", Group.SETUP, (WARNING,),
        "a topk above 1 on SGLang 0.5.13 and later",
        "a tree of drafts is legal there and costs more per step: measured on one H200 at the same "
        "accept length, it fell behind the baseline near 64 requests and topk 1 did not before 96; "
        "it also rules out trtllm_mha, adaptive speculation and rejection sampling",
        "calibrate --speculative-eagle-topk 1 too, and keep the better one",
        _topk_tree, ("algorithm", "release"), _SPECULATIVE,
    ),
    Rule(
        "eagle-head", Group.SETUP, (WARNING,),
        "algorithm EAGLE with a draft whose name says EAGLE-3",
        "an EAGLE-3 head under EAGLE loads, runs and accepts nothing",
        "--speculative-algorithm EAGLE3",
        _head, ("algorithm", "speculative_draft_model_path"), _SPECULATIVE,
    ),
    Rule(
        "adaptive-static", Group.SETUP, (SPOILS,),
        "that adaptive speculation, where it was asked for, is in force",
        "it was given up with one line in the log: what is calibrated is the static kind",
        "--speculative-eagle-topk 1 and no attention-DP, multi-layer EAGLE or two-batch overlap; or "
        "leave out --speculative-adaptive",
        _adaptive_static, ("speculative_adaptive",), _SPECULATIVE,
    ),
    Rule(
        "adaptive-on", Group.SETUP, (WARNING,),
        "whether the speculative server changes its own number of steps",
        "it switches speculation off by its own table as it fills, so the curve is that of two "
        "mechanisms, and even at 0 steps it is slower than a plain server",
        "leave out --speculative-adaptive, and let the router switch; or calibrate both ways",
        _adaptive, ("speculative_adaptive",), _SPECULATIVE,
    ),
    Rule(
        "simulated-acceptance", Group.SETUP, (SPOILS,),
        "SGLANG_SIMULATE_ACC_LEN, where the server lists its environment",
        "the accept length is made up and the text is nonsense: a test setting",
        "take SGLANG_SIMULATE_ACC_LEN out of the environment",
        _simulated, ("env",), _SPECULATIVE,
    ),
    Rule(
        "baseline-speculates", Group.PARITY, (SPOILS,),
        "that no algorithm was resolved on the baseline server",
        "two speculative servers are compared: there is no plain one to go to under load",
        "leave out every --speculative-... flag on the baseline",
        _baseline_on, ("algorithm",), _BASELINE,
    ),
    Rule(
        "baseline-verifies", Group.PARITY, (SPOILS,),
        "that no verify steps are counted on the baseline server",
        "it speculates although its /server_info does not say so",
        "leave out every --speculative-... flag on the baseline, and start it again",
        _baseline_verifies, ("verified",), _BASELINE,
    ),
)  # fmt: skip
