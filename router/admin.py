"""The admin app: what an operator and Prometheus see, and the three things that can be changed.

The page at `/` is open and holds no data: it asks for it like any other client. Reading needs the admin key only if one is configured; changing always does, and without one is
refused with the way to get it. Each change is logged and stands in `/decisions` as an event, where
it explains the decisions after it.
"""

from __future__ import annotations

import logging
import math
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request
from fastapi.security import HTTPBearer
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from router import __version__, errors
from router.admin_events import EventStream, listen
from router.admin_host import HostGuard
from router.admin_models import Alive, Decisions, DrainState, ErrorBody, PolicyChange, PolicyItem
from router.admin_models import Status as StatusBody
from router.admin_page import StatusPage
from router.affinity_exposition import AffinityCollector
from router.auth import KeyRing
from router.calibration_exposition import CalibrationCollector
from router.config_types import is_loopback
from router.explain import RING_SIZE
from router.exposition import create_registry
from router.line_exposition import LineCollector
from router.load import PolicyMemory, Role
from router.pair_exposition import PairCollector
from router.pair_watch import PairState
from router.policies import PolicyError, configured_policy, make_frontier, policy_name
from router.policy import FrontierPolicy, Policy, Reason
from router.status_live import Live
from router.status_view import policy_item, status_body
from router.view import RelayView
from router.web import AnswerError, KeyGuard, handle_errors

_log = logging.getLogger("crossover")

OPEN: Final = frozenset({"/", "/healthz"})  # paths that tell nothing, and so need no key
_ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    401: {"model": ErrorBody, "description": "The admin key is missing or wrong."},
    422: {"model": ErrorBody, "description": "A parameter or the body is not valid."},
}
_CHANGE_ERRORS: Final[dict[int | str, dict[str, Any]]] = _ERRORS | {
    400: {"model": ErrorBody, "description": "The change makes no sense."},
    403: {"model": ErrorBody, "description": "No admin key is configured."},
}


class Admin:
    """The endpoints, each a short method."""

    def __init__(
        self,
        relay: RelayView,
        registry: CollectorRegistry,
        pair: PairState | None = None,
        live: Live | None = None,
    ) -> None:
        self._relay = relay
        self._registry = registry
        self._pair = pair
        self._live = live or Live(relay)

    async def may_change(self) -> None:
        """Let a change through. Raises AnswerError (403) when no admin key is configured.

        That the key is right was seen to before.
        """
        if self._relay.settings.admin_key is None:
            raise AnswerError(errors.NO_ADMIN_KEY)

    async def metrics(self, request: Request) -> Response:
        """Everything for Prometheus: its text format, or OpenMetrics if asked for by `Accept`."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), media_type=content_type)

    async def decisions(
        self,
        reason: Annotated[Reason | None, Query(description="Only these.")] = None,
        backend: Annotated[Role | None, Query(description="Only those to this one.")] = None,
        limit: Annotated[int, Query(ge=1, le=RING_SIZE)] = 100,
    ) -> Decisions:
        """The last decisions and events, newest first; a filter leaves the events out."""
        found = self._relay.decisions.view(reason=reason, backend=backend, limit=limit)
        return Decisions.model_validate({"items": found}, from_attributes=True)

    async def status(self) -> StatusBody:
        """The whole router at one moment."""
        return status_body(self._relay, self._pair, self._live.path)

    async def events(
        self, last_event_id: Annotated[str, Header(max_length=64)] = ""
    ) -> EventStream:
        """The decisions as they happen, as server-sent events; `Last-Event-ID` goes on after it."""
        return listen(self._live.feed, self._relay.clock, last_event_id)

    async def healthz(self) -> Alive:
        """Says that the process answers; whether it can serve, the public /ready says."""
        return Alive()

    async def set_policy(self, change: PolicyChange) -> PolicyItem:
        """Decide by another policy, or along another line, from the next request on."""
        relay = self._relay
        before = policy_name(relay.policy)
        try:
            relay.policy = self._policy(change)
        except PolicyError as error:
            raise AnswerError(errors.BAD_REQUEST.with_message(str(error))) from error
        if change.policy != before:
            # The memory of one kind of policy means nothing to another.
            relay.tracker.memory = PolicyMemory()
        given = change.model_dump(exclude_none=True)
        self._note("policy", ", ".join(f"{name}={value}" for name, value in given.items()))
        return policy_item(relay)

    async def drain(self, role: Role) -> DrainState:
        """Send this backend no new work; what runs there goes on."""
        return self._drain(role, drained=True)

    async def enable(self, role: Role) -> DrainState:
        """Send this backend work again."""
        return self._drain(role, drained=False)

    def _policy(self, change: PolicyChange) -> Policy:
        """The policy that a change asks for. Raises PolicyError for one that makes no sense."""
        relay = self._relay
        # A null is what many clients send for what they leave out.
        line = change.model_dump(exclude_none=True).keys() & {"threshold", "scope", "band", "dwell"}
        if change.policy != "frontier" and line:
            raise PolicyError(f"{', '.join(sorted(line))}: only for the frontier policy")
        configured = relay.configured
        if change.policy == "frontier" and not line and configured is not None:
            return configured  # what the watch over the calibration keeps up to date
        # What a calibration asks for wins over the settings; the configured policy knows it.
        known = configured if isinstance(configured, FrontierPolicy) else relay.settings
        frontier = relay.frontier
        if change.threshold is not None:
            words = {"always": math.inf, "never": 0.0}
            number = change.threshold
            threshold = words[number] if isinstance(number, str) else number
            frontier = make_frontier(threshold, change.scope or relay.settings.scope)
        elif change.scope is not None:
            raise PolicyError("scope: only together with a threshold")
        return configured_policy(
            change.policy,
            relay.settings,
            frontier,
            band=known.band if change.band is None else change.band,
            dwell=known.dwell if change.dwell is None else change.dwell,
        )

    def _drain(self, role: Role, *, drained: bool) -> DrainState:
        health = self._relay.health
        health.drain(role, drained=drained, now=self._relay.clock())
        self._note("drain" if drained else "enable", role.value)
        return DrainState(role=role, drained=drained, usable=health.status(role).usable)

    def _note(self, event: str, detail: str) -> None:
        self._relay.decisions.event(self._relay.clock(), event, detail)
        _log.info("%s: %s, by an operator", event, detail, extra={"change": event})


def create_admin_app(
    relay: RelayView,
    registry: CollectorRegistry | None = None,
    *,
    pair: PairState | None = None,
    live: Live | None = None,
) -> FastAPI:
    """The admin listener's app. Without a `registry` it makes one of the relay's metrics.

    `pair` is what the watch over the pair knows; without one, nobody watches. `live` is moved
    on by the router's sweep.
    """
    registry = registry or create_registry(relay.metrics, relay)
    registry.register(LineCollector(relay))
    if pair is not None:
        registry.register(PairCollector(pair))
    if relay.tracker.prefixes is not None:
        registry.register(AffinityCollector(relay.tracker.prefixes))
    if relay.calibration is not None:
        registry.register(CalibrationCollector(relay, relay.calibration))
    admin = Admin(relay, registry, pair, live)
    app = FastAPI(
        title="Crossover admin",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    # Documentation only: the key is checked in front of the app, for every path but OPEN.
    bearer = Depends(HTTPBearer(auto_error=False, description="The admin key."))
    read = APIRouter(dependencies=[bearer], responses=_ERRORS)
    read.get("/decisions")(admin.decisions)
    read.get("/status")(admin.status)
    read.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )(admin.metrics)
    change = APIRouter(dependencies=[bearer, Depends(admin.may_change)], responses=_CHANGE_ERRORS)
    change.post("/policy")(admin.set_policy)
    change.post("/backends/{role}/drain")(admin.drain)
    change.post("/backends/{role}/enable")(admin.enable)
    app.include_router(change)
    # A stream without an end, and a page for people: not of the document for programs.
    read.get("/events", include_in_schema=False, response_model=None)(admin.events)
    app.include_router(read)
    app.get("/healthz")(admin.healthz)
    app.get("/", include_in_schema=False)(StatusPage().response)
    handle_errors(app)
    key = relay.settings.admin_key
    ring = KeyRing([key.get_secret_value()] if key else [])
    if key is None and is_loopback(relay.settings.admin_host):
        app.add_middleware(HostGuard, paths=OPEN)
    app.add_middleware(KeyGuard, ring=ring, needs_key=lambda scope: scope["path"] not in OPEN)
    return app
