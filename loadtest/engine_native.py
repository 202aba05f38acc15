"""SGLang's own `/generate`: the text so far in every chunk, and `meta_info` with its history.

Bytes are made here and sent elsewhere.
"""

from __future__ import annotations

from typing import Any, Final

from loadtest.engine_errors import QUEUE_FULL, Refusal
from loadtest.engine_generation import Event, Generation
from loadtest.engine_http import DONE, SSE
from loadtest.engine_request import Wanted
from loadtest.engine_wire import DRAFTS, encode, spec_details

OVERLOADED: Final = (
    b'data: {"error":{"message":"%s","code":503,"retryable":false}}\n\n' % QUEUE_FULL.encode(),
    DONE,
)


class NativeStream:
    """The stream of `/generate`."""

    content_type = SSE

    def __init__(self, wanted: Wanted, generation: Generation, rid: str, created: float) -> None:
        self._wanted = wanted
        self._generation = generation
        self._rid = rid
        self._created = created
        self._first = True

    def events(self, event: Event) -> list[bytes]:
        """The chunk that this news makes; with several choices each says which one it is of."""
        produced = event.first + event.tokens
        answer = one(
            self._wanted, self._generation, self._rid, self._created, event.choice, produced
        )
        answer["meta_info"] = self._so_far(answer["meta_info"], last=event.finish is not None)
        if len(self._wanted.choices) > 1:
            answer["index"] = event.choice
        return [b"data: " + encode(answer) + b"\n\n"]

    def ending(self) -> list[bytes]:
        """Only the end mark: everything has been said in each chunk."""
        return [DONE]

    def _so_far(self, meta: dict[str, Any], *, last: bool) -> dict[str, Any]:
        """What a chunk knows: the first when it was sent, the last how everything went."""
        sent = {"response_sent_to_client_ts": self._created}
        if last:
            times = {name: meta[name] for name in ("request_finished_ts", "decode_throughput")}
            return {name: meta[name] for name in meta if name not in (*times, *sent)} | sent | times
        known = {name: meta[name] for name in RUNNING} | {"finish_reason": None}
        if self._first:
            self._first = False
            known |= sent
        return known


def native_body(wanted: Wanted, generation: Generation, rid: str, created: float) -> bytes:
    """An answer in one piece; a list if there are several."""
    answers = [
        one(wanted, generation, rid, created, choice, sequence.produced)
        for choice, sequence in enumerate(generation.sequences)
    ]
    return encode(answers[0] if len(answers) == 1 else answers)


def error_body(refusal: Refusal) -> bytes:
    """What `/generate` says of a bad value; a body that does not fit, or a full queue, is flat."""
    if refusal.kind == "BadRequestError":
        return encode({"error": {"message": refusal.message}})
    return refusal.body()


# The fields that every chunk has, in their order; the others come with the last one.
RUNNING: Final = (
    *("id", "finish_reason", "prompt_tokens", "weight_version", "num_retractions"),
    *("forward_entry_time", "prefill_finished_time", "queue_time", "reasoning_tokens"),
    *("completion_tokens", "cached_tokens", "cached_tokens_details", "dp_rank"),
)


def one(
    wanted: Wanted, generation: Generation, rid: str, created: float, choice: int, produced: int
) -> dict[str, Any]:
    """One choice's answer of this many tokens, with all of its meta information."""
    asked = wanted.choices[choice]
    started = created + generation.started_at - generation.queued_at
    first = created + generation.first_token_at - generation.queued_at
    end = max(generation.finished_at, generation.first_token_at)
    reason = generation.finish_reasons[choice]
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": reason, "length": produced}
        if reason == "length"
        else {"type": reason, "matched": None},
        "prompt_tokens": asked.prompt_tokens,
        "weight_version": "default",
        "num_retractions": 0,
        "forward_entry_time": started,
        "prefill_finished_time": first,
        "queue_time": generation.started_at - generation.queued_at,
        "reasoning_tokens": 0,
        "completion_tokens": produced,
        "cached_tokens": generation.cached,
        "cached_tokens_details": {"device": generation.cached, "host": 0},
        "dp_rank": None,
        "e2e_latency": end - generation.queued_at,
    }
    if generation.speculative:
        details = spec_details(generation)
        drafts, proposed = details["spec_num_correct_drafts"], details["spec_num_proposed_drafts"]
        histogram = [0] * DRAFTS
        histogram[min(DRAFTS - 1, drafts // max(1, details["spec_verify_ct"]))] = details[
            "spec_verify_ct"
        ]
        meta |= details | {
            "spec_accepted_drafts": drafts,
            "spec_proposed_drafts": proposed,
            "spec_correct_drafts_histogram": histogram,
            "spec_accept_histogram": histogram,
        }
    decode_s = end - generation.first_token_at
    meta |= {
        "request_received_ts": created,
        "api_server_dispatch_finish_ts": created,
        "request_finished_ts": created + end - generation.queued_at,
        "decode_throughput": (produced - 1) / decode_s if decode_s > 0 else 0.0,
        "response_sent_to_client_ts": created + end - generation.queued_at,
    }
    return {
        "text": asked.answer.text(0, produced),
        "output_ids": asked.answer.ids(0, produced),
        "meta_info": meta,
    }
