#!/usr/bin/env bash
# Measures a pair on this host and tries it: calibrate, compare, overhead, trials. Each part is kept and
# gone on with, so that it may be run in pieces:
#
#   RESULTS=results LAUNCH="crossover launch --config pair.toml" deploy/calibrations/measure.sh start calibrate compare overhead trials
#
# Parts: start (the pair and the router), calibrate, compare (live, around the line), overhead (the
# same sweep direct and through the router), trials (clients that leave, a killed server, SIGTERM: the
# last part, it ends the pair). Seconds of a part may be bounded: calibrate=450.
set -uo pipefail
PYTHON=${PYTHON:-python3}
RESULTS=$(realpath -m "${RESULTS:-results}"); mkdir -p "$RESULTS"
LAUNCH=${LAUNCH:?the command that starts the pair and the router, as in the head of this file}
SPECULATIVE=${SPECULATIVE:-http://127.0.0.1:31000}; BASELINE=${BASELINE:-http://127.0.0.1:30000}
ROUTER=${ROUTER:-http://127.0.0.1:8000}; ADMIN=${ADMIN:-http://127.0.0.1:9400}
LEVELS=${LEVELS:-8,32,64,96,128,192}; PASSES=${PASSES:-2}
IN=${IN:-64}; OUT_TOKENS=${OUT_TOKENS:-256}; SECONDS_EACH=${SECONDS_EACH:-6}
COMPARE_SECONDS=${COMPARE_SECONDS:-60}; COMPARE_PASSES=${COMPARE_PASSES:-1}; LOADS=${LOADS:-}
OVERHEAD_LEVELS=${OVERHEAD_LEVELS:-8,64,128}
CALIBRATION=${CALIBRATION:-$RESULTS/calibration.json}
began=$(date +%s)
say() { echo "[$(( $(date +%s) - began )) s] $*"; }

ready() { # until the router says so, or whoever starts it is gone
  local i; for i in $(seq 600); do
    curl -sf -m 2 -o /dev/null "$ROUTER/ready" && [ "$(usable)" = 2 ] && return 0
    kill -0 "$(cat "$RESULTS/launch.pid")" 2>/dev/null || return 1
    sleep 0.5
  done; return 1
}
usable() { # how many of the two servers the router uses
  curl -s -m 5 -H "authorization: Bearer ${LOADTEST_ADMIN_KEY:-}" "$ADMIN/status" \
    | "$PYTHON" -c 'import json,sys; print(sum(b["usable"] for b in json.load(sys.stdin)["backends"]))' 2>/dev/null
}
in_force() { # until the router has taken up the calibration that was just written
  local i made; made=$("$PYTHON" -c 'import json,sys; print(json.load(open(sys.argv[1]))["created"])' "$CALIBRATION") || return 1
  for i in $(seq 60); do
    curl -s -m 5 -H "authorization: Bearer ${LOADTEST_ADMIN_KEY:-}" "$ADMIN/status" | grep -q "\"created\": *\"$made\"" && return 0
    sleep 0.5
  done; return 1
}
policy() {
  curl -sf -m 5 -o /dev/null -H "authorization: Bearer ${LOADTEST_ADMIN_KEY:-}" \
    -H 'content-type: application/json' -d "{\"policy\": \"$1\"}" "$ADMIN/policy"
}
around() { # three loads: well below the line, at it, well above
  "$PYTHON" - "$CALIBRATION" "$LEVELS" <<'P'
import json, sys
made, levels = json.load(open(sys.argv[1])), [int(x) for x in sys.argv[2].split(",")]
line = made["frontier"].get("threshold")
line = line if isinstance(line, (int, float)) and line > 0 else levels[len(levels) // 2]
print(",".join(str(x) for x in sorted({max(1, round(line / 3)), round(line), min(max(levels), round(2 * line))})))
P
}

for part in "$@"; do
  name=${part%%=*}; limit=3600; [ "$name" = "$part" ] || limit=${part#*=}
  say "$name"
  case $name in
    start)
      setsid nohup $LAUNCH >"$RESULTS/launch.log" 2>&1 </dev/null &
      echo $! >"$RESULTS/launch.pid"
      ready || { say "the pair did not start"; tail -n 40 "$RESULTS/launch.log" | cut -c1-300; exit 1; }
      "$PYTHON" -m router doctor --speculative "$SPECULATIVE" --baseline "$BASELINE" --json >"$RESULTS/doctor.json"
      say "doctor: exit code $?" ;;
    calibrate)
      timeout "$limit" "$PYTHON" -m loadtest calibrate --speculative "$SPECULATIVE" --baseline "$BASELINE" \
        --levels "$LEVELS" --passes "$PASSES" --seconds "$SECONDS_EACH" --most-seconds $(( SECONDS_EACH + 3 )) --warm-up 1.5 \
        --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --anyway --work "$RESULTS/sweeps" --out "$CALIBRATION" \
        >"$RESULTS/calibrate.log" 2>&1; say "exit code $?"; tail -n 12 "$RESULTS/calibrate.log" | cut -c1-400
      in_force || say "the router does not decide by $CALIBRATION" ;;
    compare)
      timeout "$limit" "$PYTHON" -m loadtest compare --live --url "$ROUTER" --admin-url "$ADMIN" \
        --policies baseline,speculative,frontier --loads "${LOADS:-$(around)}" --passes "$COMPARE_PASSES" \
        --seconds "$COMPARE_SECONDS" --warm-up 5 --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --out "$RESULTS/compare" \
        >"$RESULTS/compare.log" 2>&1; say "exit code $?"; tail -n 40 "$RESULTS/compare.log" | cut -c1-300 ;;
    overhead) # the router takes the place of the other server in the sweep, and sends all to the baseline
      policy baseline
      timeout "$limit" "$PYTHON" -m loadtest sweep --url "$BASELINE" --role baseline --url "$ROUTER" --role speculative \
        --levels "$OVERHEAD_LEVELS" --passes "$PASSES" --seconds "$SECONDS_EACH" --most-seconds $(( SECONDS_EACH + 3 )) --warm-up 1.5 \
        --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --out "$RESULTS/overhead" >"$RESULTS/overhead.log" 2>&1
      say "exit code $?"; policy frontier; tail -n 12 "$RESULTS/overhead.log" | cut -c1-300 ;;
    trials)
      timeout "$limit" "$PYTHON" -m tests.real_pair --url "$ROUTER" --admin-url "$ADMIN" --speculative "$SPECULATIVE" \
        --baseline "$BASELINE" --launcher "$(cat "$RESULTS/launch.pid")" --json "$RESULTS/trials.json" ${TRIALS:-} \
        2>&1 | tee "$RESULTS/trials.log" ;;
    *) echo "measure.sh: no such part: $name" >&2; exit 2 ;;
  esac
done
say end
