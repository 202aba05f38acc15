"""What a request head may look like: each row of the table of framing attacks, and the limits."""

from __future__ import annotations

from collections.abc import Mapping

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router import errors, framing, guard
from router import headers as rules
from router.errors import ErrorAnswer
from router.guard import HeadFacts, path_of, pinned_role, read_head
from router.headers import NOT_TO_BACKEND
from router.incoming import HeadLimits, Incoming
from router.load import Role
from router.routes import TABLE, Route

Headers = list[tuple[bytes, bytes]]
HOST = (b"host", b"127.0.0.1:8000")
LIMITS = HeadLimits(header_bytes=16_384, headers=100, url_bytes=8192)


def head(*headers: tuple[bytes, bytes], version: str = "1.1") -> HeadFacts:
    """The facts of a head that must be sound."""
    facts = read_head(version, list(headers))
    assert isinstance(facts, HeadFacts)
    return facts


def refusal(*headers: tuple[bytes, bytes], version: str = "1.1") -> tuple[int, str]:
    """The status and code with which a head must be refused."""
    error = read_head(version, list(headers))
    assert isinstance(error, ErrorAnswer)
    return error.status, error.code


def forwarded(*headers: tuple[bytes, bytes]) -> list[bytes]:
    lines = head(HOST, *headers).forwarded
    assert not lines or lines.endswith(b"\r\n")
    return lines.split(b"\r\n")[:-1]


def arrive(
    target: bytes = b"/v1/completions",
    method: bytes = b"POST",
    headers: Headers | None = None,
    *,
    version: str = "1.1",
    keep_alive: bool = True,
    table: Mapping[bytes, Route] = TABLE,
) -> Incoming:
    """A request whose head was read and checked."""
    headers = [HOST] if headers is None else headers
    incoming = Incoming(method, target, headers, version, keep_alive=keep_alive)
    incoming.check(LIMITS, table)
    return incoming


# ---------------------------------------------------------------------- Host


@pytest.mark.parametrize(
    ("hosts", "version", "sound"),
    [
        (1, "1.1", True),
        (0, "1.1", False),
        (2, "1.1", False),
        (3, "1.1", False),
        (0, "1.0", True),
        (1, "1.0", True),
        (2, "1.0", False),
    ],
)
def test_exactly_one_host(hosts: int, version: str, sound: bool) -> None:
    """HTTP/1.1 needs one Host, no version allows two, be they equal."""
    answer = read_head(version, [HOST] * hosts)
    if sound:
        assert isinstance(answer, HeadFacts)
    else:
        assert isinstance(answer, ErrorAnswer)
        assert (answer.status, answer.message) == (400, "exactly one Host header is needed")


@pytest.mark.parametrize(
    ("value", "sound"),
    [
        (b"", True), (b"x", True), (b"a.example:8000", True), (b"127.0.0.1", True),
        (b"[::1]", True), (b"[fe80::1%25eth0]:80", True), (b"my_pod.ns.svc", True),
        (b"xn--bcher-kva.example", True), (b"x:", True), (b" x ", True),
        (b"x, y", False), (b"x,y", False), (b"x y", False), (b"x/", False), (b"u@x", False),
        (b"x?q", False), (b"x#f", False), (b"http://x", False), (b"x:y", False), (b"[::1", False),
        (b"::1", False), (b"\xfc", False), (b"\x0bx", False), (b'"x"', False), (b"x\\y", False),
    ],
)  # fmt: skip
def test_a_host_is_a_host(value: bytes, sound: bool) -> None:
    """RFC 9112 section 3.2: a Host that cannot be one is refused, however often it comes."""
    for version in ("1.1", "1.0"):
        answer = read_head(version, [(b"host", value)])
        assert isinstance(answer, HeadFacts if sound else ErrorAnswer)


# ---------------------------------------------------------------------- how the body is framed


@pytest.mark.parametrize(
    ("value", "length"),
    [(b"0", 0), (b"3", 3), (b"007", 7), (b"9" * 18, int("9" * 18))],
)
def test_a_length_is_digits(value: bytes, length: int) -> None:
    """A Content-Length of digits is the length."""
    facts = head(HOST, (b"content-length", value))
    assert (facts.length, facts.chunked) == (length, False)


@pytest.mark.parametrize(
    "value",
    [b"", b" ", b"+3", b"-1", b"0x3", b"1_0", b"3, 3", b"3,3", b"3 3", b"1e1", b"3.0", b"\xb2",
     b"9" * 19, b"18446744073709551617", b"chunked"],
)  # fmt: skip
def test_any_other_length_is_refused(value: bytes) -> None:
    """What two servers could read as different lengths is no length."""
    assert refusal(HOST, (b"content-length", value)) == (400, "bad_request")


@pytest.mark.parametrize("second", [b"3", b"4", b"0"])
def test_two_lengths_are_refused(second: bytes) -> None:
    """A repeated Content-Length is refused, also when both say the same."""
    assert refusal(HOST, (b"content-length", b"3"), (b"content-length", second))[0] == 400


@pytest.mark.parametrize("value", [b"chunked", b"Chunked", b"CHUNKED", b" chunked\t"])
def test_chunked_is_the_only_coding(value: bytes) -> None:
    """Exactly chunked, in any case, is understood; the body has no length then."""
    facts = head(HOST, (b"transfer-encoding", value))
    assert (facts.chunked, facts.length) == (True, None)


@pytest.mark.parametrize(
    "value",
    [b"xchunked", b"chunkedx", b"identity", b"gzip", b"gzip, chunked", b",chunked", b"chunked,",
     b"chunked, chunked", b"chunked;q=1", b"\x0bchunked", b"\x0cchunked", b"chunked\x0b",
     b"\x85chunked", b"\xa0chunked", b'"chunked"', b"chun ked", b""],
)  # fmt: skip
def test_any_other_coding_is_refused(value: bytes) -> None:
    """A coding that another server might take for chunked, or not, is refused."""
    assert refusal(HOST, (b"transfer-encoding", value)) == (501, "transfer_encoding")


def test_two_codings_are_refused() -> None:
    """Chunked twice is not chunked once."""
    coding = (b"transfer-encoding", b"chunked")
    assert refusal(HOST, coding, coding) == (501, "transfer_encoding")


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [b"0", b"5"])
def test_length_beside_coding_is_refused(turned: bool, length: bytes) -> None:
    """Content-Length and Transfer-Encoding together are refused, in either order."""
    both = [(b"content-length", length), (b"transfer-encoding", b"chunked")]
    assert refusal(HOST, *(reversed(both) if turned else both)) == (400, "bad_request")


def test_no_coding_in_http_1_0() -> None:
    """HTTP/1.0 has no Transfer-Encoding."""
    assert refusal(HOST, (b"transfer-encoding", b"chunked"), version="1.0")[0] == 400
    assert refusal(HOST, (b"transfer-encoding", b"gzip"), version="1.0")[0] >= 400


@pytest.mark.parametrize("version", ["0.9", "2.0", "1.2", "3.0", "", "1"])
def test_other_versions_are_refused(version: str) -> None:
    """A version that is neither 1.1 nor 1.0 is refused before anything is read."""
    assert refusal(HOST, version=version) == (505, "http_version")


# ---------------------------------------------------------------------- other special headers


@pytest.mark.parametrize(
    ("value", "version", "expects"),
    [
        (b"100-continue", "1.1", True),
        (b"100-Continue", "1.1", True),
        (b"100-continue", "1.0", False),  # it would not understand the 100
    ],
)
def test_expect_continue(value: bytes, version: str, expects: bool) -> None:
    """A 1.1 client may ask for a 100 before its body; from a 1.0 client it is ignored."""
    assert head(HOST, (b"expect", value), version=version).expects is expects


@pytest.mark.parametrize("value", [b"", b"200-ok", b"100-continue, x", b"\x0b100-continue"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_other_expectations_are_refused(value: bytes, version: str) -> None:
    """An expectation that we cannot meet is a 417."""
    assert refusal(HOST, (b"expect", value), version=version) == (417, "expectation_failed")


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([b"abc-123_x.y:z"], "abc-123_x.y:z"),
        ([b"a" * 128], "a" * 128),
        ([b"a" * 129], None),
        ([b""], None),
        ([b"a b"], None),
        ([b"a\r\nx: y"], None),
        ([b"a\n"], None),
        ([b"\xfc"], None),
        ([b'"x"'], None),
        ([b"first", b"second"], "first"),
        ([b"no good", b"second"], "second"),
    ],
)
def test_a_request_id_is_kept_if_harmless(values: list[bytes], kept: str | None) -> None:
    """The first id that can do no harm in a header, a log line or a URL is the request's."""
    assert head(HOST, *((b"x-request-id", value) for value in values)).request_id == kept


@pytest.mark.parametrize(
    ("values", "encoded"),
    [
        ([], False),
        ([b""], False),
        ([b"identity"], False),
        ([b" Identity "], False),
        ([b"gzip"], True),
        ([b"gzip, br"], True),
        ([b"gzip", b"identity"], True),
        ([b"identity", b"zstd"], True),
    ],
)
def test_an_encoded_body_is_noticed(values: list[bytes], encoded: bool) -> None:
    """If any coding is named, nothing can be read of the body; the header goes with it."""
    lines = [(b"content-encoding", value) for value in values]
    assert head(HOST, *lines).encoded is encoded
    assert len(forwarded(*lines)) == len(values)


@pytest.mark.parametrize(
    ("values", "role"),
    [
        ([b"speculative"], Role.SPECULATIVE),
        ([b" Baseline "], Role.BASELINE),
        ([b"both"], None),
        ([b""], None),
        ([b"\xff"], None),
        ([b"speculative", b"baseline"], None),
        ([b"baseline", b"baseline"], None),
    ],
)
def test_a_pin_names_one_role(values: list[bytes], role: Role | None) -> None:
    """A pin is one of the two words; given twice or otherwise it is noticed and names none."""
    pinned = head(HOST, *((b"x-crossover-backend", value) for value in values)).pinned
    assert pinned is not None
    assert pinned_role(pinned) is role


def test_without_a_pin_there_is_none() -> None:
    """A request without the header is not pinned."""
    assert head(HOST).pinned is None


def test_an_upgrade_is_noticed_and_goes_no_further() -> None:
    """An Upgrade is no error, and none of its headers reaches a backend."""
    upgrade = [HOST, (b"connection", b"Upgrade, HTTP2-Settings"), (b"upgrade", b"h2c"),
               (b"http2-settings", b"AAM")]  # fmt: skip
    facts = head(*upgrade)
    assert (facts.upgrade, facts.forwarded) == (True, b"")
    assert arrive(headers=upgrade).error is None


def test_origin_is_noted_and_forwarded() -> None:
    """The origin decides on CORS and still reaches the backend."""
    facts = head(HOST, (b"origin", b"https://a.example"))
    assert facts.origin == b"https://a.example"
    assert facts.forwarded == b"origin: https://a.example\r\n"


# ---------------------------------------------------------------------- what a backend gets


@pytest.mark.parametrize("name", sorted(NOT_TO_BACKEND - {b"content-length", b"expect"}))
def test_hop_by_hop_and_credentials_stay_here(name: bytes) -> None:
    """No header of this connection and no key, cookie or host of the client's goes further."""
    value = b"chunked" if name == b"transfer-encoding" else b"canary"
    headers = [] if name == b"host" else [(name, value)]
    assert forwarded(*headers, (b"accept", b"*/*")) == [b"accept: */*"]


@pytest.mark.parametrize(
    "secret",
    [
        [(b"authorization", b"Bearer canary")],
        [(b"authorization", b"Bearer x"), (b"authorization", b"Bearer canary")],
        [(b"proxy-authorization", b"Basic canary")],
        [(b"x-api-key", b"canary")],
        [(b"api-key", b"canary")],
        [(b"cookie", b"session=canary"), (b"cookie", b"canary")],
        [(b"x_api_key", b"canary")],
        [(b"connection", b"x-api-key"), (b"x-api-key", b"canary")],
    ],
)
def test_the_clients_key_never_reaches_a_backend(secret: Headers) -> None:
    """However it is sent, the client's credential is not among the forwarded lines."""
    assert b"canary" not in head(HOST, *secret).forwarded


@pytest.mark.parametrize(
    "name",
    [
        b"x-goog-api-key", b"ocp-apim-subscription-key", b"x-auth-token", b"x-access-token",
        b"x-amzn-oidc-accesstoken", b"x-amz-security-token", b"x-forwarded-access-token",
        b"helicone-auth", b"x-forwarded-authorization", b"x-apikey", b"apikey", b"x-password",
        b"x-client-secret", b"cf-access-client-secret", b"x-goog-iap-jwt-assertion", b"cookie2",
        b"x-secret-key", b"x-user-credentials", b"x-csrf-token", b"token",
    ],
)  # fmt: skip
def test_a_credential_by_another_name_stays_here(name: bytes) -> None:
    """A header that has a word for a secret in its name is one, whoever's name it is."""
    for _ in range(2):  # the second time from memory
        assert forwarded((name, b"canary"), (b"x-kept", b"1")) == [b"x-kept: 1"]


@pytest.mark.parametrize(
    "name",
    [
        b"idempotency-key", b"x-smg-routing-key", b"x-max-tokens", b"x-author", b"authority",
        b"x-session-id", b"traceparent", b"openai-organization", b"x-keyboard", b"secretary",
    ],
)  # fmt: skip
def test_what_only_sounds_like_a_credential_passes(name: bytes) -> None:
    """Keys that open nothing and words that merely hold such a word reach the backend."""
    assert forwarded((name, b"1")) == [name + b": 1"]


def test_endless_new_names_are_not_remembered() -> None:
    """What was found of names and hosts is bounded, whatever clients make up."""
    for i in range(3 * framing.REMEMBERED):
        head((b"host", b"h%d" % i), (b"x-%d" % i, b"1"), (b"x-" + b"y" * 600 + b"%d" % i, b"1"))
    assert len(rules._forwarded) <= framing.REMEMBERED
    assert len(guard._hosts) <= framing.REMEMBERED


def test_names_with_an_underscore_are_dropped() -> None:
    """A name that some server would read as a dash is neither heeded nor forwarded."""
    tricks = [(b"content_length", b"5"), (b"transfer_encoding", b"chunked"), (b"x_role", b"admin"),
              (b"x-crossover_backend", b"baseline")]  # fmt: skip
    facts = head(HOST, *tricks)
    assert facts == HeadFacts()


def test_only_the_router_speaks_of_crossover() -> None:
    """A client cannot put words into the router's mouth towards a backend."""
    assert forwarded((b"x-crossover-backend", b"baseline"), (b"x-crossover-x", b"1")) == []


def test_what_connection_names_is_not_forwarded() -> None:
    """All headers named by any Connection header are dropped, wherever they stand."""
    assert forwarded(
        (b"x-before", b"1"), (b"connection", b"X-Before, close"), (b"x-kept", b"2"),
        (b"x-after", b"3"), (b"connection", b" x-after ,"), (b"x-after", b"4"),
    ) == [b"x-kept: 2"]  # fmt: skip


def test_naming_host_in_connection_changes_nothing() -> None:
    """Connection cannot remove what the guard itself relies on."""
    facts = head(HOST, (b"connection", b"host, content-length"), (b"content-length", b"3"))
    assert facts.length == 3
    assert refusal((b"connection", b"host"))[0] == 400


def test_everything_else_is_forwarded_as_it_was() -> None:
    """Repeats, order and values are kept."""
    headers = [(b"accept", b"a"), (b"x-tag", b"1"), (b"x-tag", b"2"), (b"content-type", b"a/b;c"),
               (b"user-agent", b"  spaced "), (b"x-empty", b""), (b"x-bytes", b"\xff\x80"),
               (b"accept-encoding", b"gzip, br"), (b"traceparent", b"00-1-2-3"),
               (b"anthropic-version", b"2023-06-01")]  # fmt: skip
    assert forwarded(*headers) == [b"%b: %b" % header for header in headers]


names = st.sampled_from([
    b"content-length", b"transfer-encoding", b"host", b"connection", b"expect", b"authorization",
    b"x-api-key", b"cookie", b"content_length", b"te", b"trailer", b"upgrade", b"keep-alive",
    b"x-crossover-backend", b"x-request-id", b"content-encoding", b"origin", b"accept", b"x-tag",
])  # fmt: skip
contents = st.sampled_from([
    b"", b"0", b"5", b"chunked", b"gzip, chunked", b"close", b"x-tag, accept", b"100-continue",
    b"Bearer canary", b"speculative", b"host",
]) | st.binary(max_size=8).map(lambda raw: raw.translate(None, b"\r\n\0"))  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(headers=st.lists(st.tuples(names, contents), max_size=12), version=st.sampled_from(["1.0", "1.1"]))  # fmt: skip
def test_what_passes_the_guard_has_one_meaning(headers: Headers, version: str) -> None:
    """Whatever the head: refused, or one Host, one framing, and only harmless lines go on."""
    facts = read_head(version, headers)
    given_names = [name for name, _ in headers]
    if isinstance(facts, ErrorAnswer):
        assert 400 <= facts.status < 506
        return
    assert given_names.count(b"host") <= 1
    assert version == "1.0" or b"host" in given_names
    assert given_names.count(b"content-length") + given_names.count(b"transfer-encoding") <= 1
    assert facts.chunked is (b"transfer-encoding" in given_names)
    assert (facts.length is not None) is (b"content-length" in given_names)
    sent = [line.partition(b":")[0] for line in facts.forwarded.split(b"\r\n")[:-1]]
    assert not set(sent) & NOT_TO_BACKEND
    assert not [name for name in sent if b"_" in name or name.startswith(b"x-crossover-")]


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"/v1/models", b"/v1/models"),
        (b"/v1/models?x=/y", b"/v1/models"),
        (b"/?", b"/"),
        (b"*", b"*"),
        (b"//evil/v1/models", b"//evil/v1/models"),
        (b"http://evil/v1/models", b"/v1/models"),
        (b"HTTPS://evil:1/v1/models?q", b"/v1/models"),
        (b"http://user:pass@evil/v1/models", b"/v1/models"),
        (b"http://evil", b"/"),
        (b"http://evil?q", b"/"),
        (b"http://", b"/"),
        (b"http:///v1/models", b"/v1/models"),
        (b"http://evil\\@good/v1/models", b"/v1/models"),
        (b"/v1/../flush_cache", b"/v1/../flush_cache"),
        (b"/v1/%2e%2e/flush_cache", b"/v1/%2e%2e/flush_cache"),
        (b"/v1/a%0d%0ab", b"/v1/a%0d%0ab"),
        (b"ftp://evil/v1/models", None),
        (b"file:///etc/passwd", None),
        (b"http:/v1/models", None),
        (b"evil:443", None),
        (b"v1/models", None),
        (b"", None),
        (b"?q", None),
        ("/v1/modèles".encode(), None),
        (b"/v1/\xff", None),
        (b"http://evil/\xff", None),
        (b"/v1/models?q=\xff", None),
    ],
)
def test_the_path_of_a_target(target: bytes, path: bytes | None) -> None:
    """An authority is dropped and never followed, nothing is decoded, other forms are no path."""
    assert path_of(target) == path


@pytest.mark.parametrize(
    "target", [b"/v1/modeles\xc3\xa8", b"ftp://evil/", b"evil:443", b"relative", b""]
)
def test_a_target_that_is_no_path_is_refused(target: bytes) -> None:
    """A request whose target is not a path is a 400."""
    error = arrive(target, b"GET").error
    assert error is not None
    assert (error.status, error.message) == (400, "the request target is not a path")


@pytest.mark.parametrize("method", [b"CONNECT", b"TRACE"])
@pytest.mark.parametrize("target", [b"evil:443", b"/v1/completions", b"*", b"/\xff"])
def test_connect_and_trace_are_not_allowed(method: bytes, target: bytes) -> None:
    """No tunnel and no echo, whatever the target."""
    incoming = arrive(target, method)
    assert incoming.error == errors.METHOD_NOT_ALLOWED
    assert incoming.route is None
    allowed = b"POST" if target == b"/v1/completions" else b"DELETE, GET, HEAD, OPTIONS, POST"
    assert incoming.allow == allowed  # RFC 9110 section 15.5.6: a 405 names some


@pytest.mark.parametrize(
    ("target", "method", "route", "allow"),
    [
        (b"/v1/completions", b"POST", b"/v1/completions", b""),
        (b"/completions/?q=1", b"POST", b"/v1/completions", b""),
        (b"http://evil/v1/completions", b"POST", b"/v1/completions", b""),
        (b"/", b"GET", b"/", b""),
        (b"/api/tags", b"GET", b"/api/tags", b""),
        (b"/v1/completions", b"GET", None, b"POST"),
        (b"/v1/completions", b"PUT", None, b"POST"),
        (b"/v1/completions", b"DELETE", None, b"POST"),
        (b"/v1/completions", b"HEAD", None, b"POST"),
        (b"/v1/completions", b"post", None, b"POST"),
        (b"/v1/completions", b"OPTIONS", None, b""),
        (b"/api/tags", b"POST", None, b"GET, HEAD"),
        (b"/api/tags", b"HEAD", None, b""),
        (b"/api/tags", b"OPTIONS", None, b""),
        (b"/v1/models", b"GET", None, b""),  # not relayed: the ordinary path's
        (b"/v1/models", b"DELETE", None, b""),
        (b"/v1/../flush_cache", b"POST", None, b""),
        (b"//evil/v1/completions", b"POST", None, b""),
    ],
)
def test_route_and_method(target: bytes, method: bytes, route: bytes | None, allow: bytes) -> None:
    """A route is taken with its method; another method is a 405 that says which is allowed."""
    incoming = arrive(target, method)
    found = incoming.route.path if incoming.route else None
    assert (found, incoming.allow) == (route, allow)
    assert incoming.error == (errors.METHOD_NOT_ALLOWED if allow else None)
    assert incoming.path == path_of(target)


def test_a_listener_has_its_own_table() -> None:
    """What is relayed is what the listener's table says: the admin listener relays nothing."""
    incoming = arrive(table={})
    assert (incoming.path, incoming.route, incoming.error) == (b"/v1/completions", None, None)


@pytest.mark.parametrize(
    ("version", "asked", "kept"),
    [("1.1", True, True), ("1.1", False, False), ("1.0", True, False), ("1.0", False, False)],
)
def test_only_1_1_keeps_the_connection(version: str, asked: bool, kept: bool) -> None:
    """The connection stays for the next request when both the client and HTTP/1.1 want it."""
    assert arrive(version=version, keep_alive=asked).keep_alive is kept


def test_a_bad_head_is_refused_by_what_collects_it() -> None:
    """What the guard refuses is the request's error, and no route is found for it."""
    incoming = arrive(headers=[HOST, HOST])
    assert incoming.error is not None
    assert (incoming.error.status, incoming.route) == (400, None)


def test_what_could_not_be_read_has_only_its_error() -> None:
    """A request that never became one has an answer, and no route, length or body."""
    incoming = Incoming.failed(errors.BAD_REQUEST)
    assert (incoming.error, incoming.route, incoming.keep_alive) == (
        errors.BAD_REQUEST,
        None,
        False,
    )
    assert (incoming.facts, incoming.take_body()) == (HeadFacts(), b"")


def test_requests_do_not_share_what_was_read() -> None:
    """The facts of one request are not those of the next, nor of one that was not read."""
    first, second = arrive(), arrive()
    first.facts.encoded = True
    first.body.append(b"x")
    assert (second.facts.encoded, second.body) == (False, [])
    assert Incoming().facts == HeadFacts()


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize(("count", "sound"), [(100, True), (101, False), (5000, False)])
def test_how_many_headers(count: int, sound: bool) -> None:
    """As many headers as the limit may come; with one more it is a 431."""
    incoming = arrive(headers=[HOST] + [(b"a", b"b")] * (count - 1))
    assert incoming.error == (None if sound else errors.HEADERS_TOO_LARGE)


@pytest.mark.parametrize(("over", "sound"), [(0, True), (1, False), (4_000_000, False)])
def test_how_large_the_headers(over: int, sound: bool) -> None:
    """Names, values and four bytes each may reach the limit; a byte more is a 431."""
    rest = LIMITS.header_bytes - sum(map(len, HOST)) - 4 - len(b"x-big") - 4
    incoming = arrive(headers=[HOST, (b"x-big", b"v" * (rest + over))])
    assert incoming.error == (None if sound else errors.HEADERS_TOO_LARGE)


def test_many_small_headers_add_up() -> None:
    """The size is of all headers together."""
    headers = [HOST] + [(b"x-%d" % i, b"v" * 400) for i in range(50)]
    assert arrive(headers=headers).error == errors.HEADERS_TOO_LARGE


@pytest.mark.parametrize(("over", "sound"), [(0, True), (1, False), (100_000, False)])
def test_how_long_the_target(over: int, sound: bool) -> None:
    """A target may reach the limit, its query included; a byte more is a 414."""
    incoming = arrive(b"/v1/completions?" + b"q" * (LIMITS.url_bytes - 16 + over))
    assert incoming.error == (None if sound else errors.URL_TOO_LONG)
    assert (incoming.route is not None) is sound


def test_a_head_without_end_is_given_up() -> None:
    """What may be received of one head is bounded by what a whole one may be, and no tighter."""
    request_line = len(b"OPTIONS  HTTP/1.1\r\n") + LIMITS.url_bytes
    assert LIMITS.total >= request_line + LIMITS.header_bytes + len(b"\r\n")
    assert LIMITS.total <= request_line + LIMITS.header_bytes + 100


def test_the_first_limit_reached_is_the_answer() -> None:
    """A request that is too much in two ways is told of what came first."""
    incoming = arrive(b"/" * 10_000, headers=[HOST, (b"x", b"v" * 20_000)])
    assert incoming.error == errors.URL_TOO_LONG


@pytest.mark.parametrize("pieces", [[], [b"whole"], [b"one", b"two", b"three"]])
def test_a_body_is_given_away(pieces: list[bytes]) -> None:
    """The body is handed over once, joined, and not kept."""
    incoming = arrive()
    incoming.body = list(pieces)
    assert incoming.take_body() == b"".join(pieces)
    assert incoming.body == []


# ---------------------------------------------------------------------- with the parser in front


class Parsed:
    """Feeds raw bytes to llhttp and checks the head that it reads, as a connection does."""

    def __init__(self, raw: bytes) -> None:
        self.incoming: Incoming | None = None
        self.target = b""
        self.headers: Headers = []
        self.parser_error = False
        self.parser = httptools.HttpRequestParser(self)
        try:
            self.parser.feed_data(raw)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError:
            self.parser_error = True

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.incoming is None:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        self.incoming = Incoming(method, self.target, self.headers, version, keep_alive=True)
        self.incoming.check(LIMITS, TABLE)

    @property
    def status(self) -> int | None:
        """The status of the refusal, None when the request goes on."""
        error = self.incoming.error if self.incoming else None
        return error.status if error else 400 if self.parser_error else None


START = b"POST /v1/completions HTTP/1.1\r\n"
CHUNKED = START + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (START + b"Host: x\r\nContent-Length: 3\r\n\r\nabc", None),
        (CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", None),
        (CHUNKED + b"3;a=b\r\nabc\r\n0\r\n\r\n", None),
        (START + b"Host: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (START + b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n", 400),
        (START + b"Host: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
        (START + b"Host: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (START + b"Host: x\r\nContent-Length: 3, 3\r\n\r\nabc", 400),
        (START + b"Host: x\r\nContent-Length: +3\r\n\r\nabc", 400),
        (START + b"Host: x\r\nContent-Length: -1\r\n\r\n", 400),
        (START + b"Host: x\r\nContent-Length: 0x3\r\n\r\nabc", 400),
        (START + b"Host: x\r\nContent-Length: 1_0\r\n\r\n", 400),
        (START + b"Host: x\r\nContent-Length:\r\n\r\n", 400),
        (START + b"Host: x\r\nContent-Length: 18446744073709551617\r\n\r\n", 400),
        (START + b"Host: x\r\nTransfer-Encoding: xchunked\r\n\r\n", (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: identity\r\nContent-Length: 3\r\n\r\nabc",
         (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
         (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: \x0bchunked\r\n\r\n", (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", (400, 501)),
        (START + b"Host: x\r\nTransfer-Encoding: ,chunked\r\n\r\n", (400, 501)),
        (START.replace(b"1.1", b"1.0") + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"+3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"0_3\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3\nabc\n0\n\n", 400),
        (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
        (CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n", 400),
        (CHUNKED + b"1" * 17 + b"\r\n", 400),
        (START + b"Host: x\nContent-Length: 3\n\nabc", 400),
        (START + b"Host: x\r\nX-A: a\rb\r\n\r\n", 400),
        (START + b"Host: x\r\nX-A: a\0b\r\n\r\n", 400),
        (START + b"Host: x\r\nX-A: a\r\n b\r\n\r\n", 400),
        (START + b"Host: x\r\nX-A : a\r\n\r\n", 400),
        (START + b" Host: x\r\n\r\n", 400),
        (START + b"Host: x\r\nno colon\r\n\r\n", 400),
        (START + b"Host: x\r\n: empty\r\n\r\n", 400),
        (START + b"Host: x\r\nX-\xfc: a\r\n\r\n", 400),
        (START + b"\r\n", 400),
        (START + b"Host: x\r\nHost: y\r\n\r\n", 400),
        (START + b"Host: x\r\nContent_Length: 3\r\n\r\n", None),
        (b"GET http://evil/api/tags HTTP/1.1\r\nHost: x\r\n\r\n", None),
        (b"GET /v1/mod\xc3\xa8les HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /\r\n\r\n", (400, 505)),
        (b"GET / HTTP/0.9\r\nHost: x\r\n\r\n", (400, 505)),
        (b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", (400, 505)),
        (b"CONNECT evil:443 HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (START + b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", None),
        (START + b"Host: x\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n", None),
        (START + b"Host: x\r\nExpect: other\r\nContent-Length: 3\r\n\r\n", 417),
        (START + b"Host: x\r\nX-Big: " + b"v" * 65_536 + b"\r\n\r\n", 431),
        (START + b"Host: x\r\n" + b"A: b\r\n" * 5000 + b"\r\n", 431),
        (b"GET /" + b"u" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    ],
)  # fmt: skip
def test_every_row_of_the_framing_table(raw: bytes, status: int | tuple[int, int] | None) -> None:
    """Parser and guard together refuse all that is ambiguous and let the sound requests pass."""
    found = Parsed(raw).status
    assert found in status if isinstance(status, tuple) else found == status


def test_trailers_never_become_headers() -> None:
    """What comes after the last chunk adds no header, whether or not the parser allows it."""
    raw = CHUNKED + b"3\r\nabc\r\n0\r\nX-Role: admin\r\nContent-Length: 50\r\n\r\n"
    incoming = Parsed(raw).incoming
    assert incoming is not None
    assert [name for name, _ in incoming.headers] == [b"host", b"transfer-encoding"]
    assert incoming.facts.length is None
