#!/usr/bin/env bash
# Measures a pair on this host and tries it, in parts. Each is kept and gone on with by the same
# command; the seconds of a part may be bounded, as in calibrate=450, and of all of them by WITHIN.
#
#   RESULTS=results LAUNCH="crossover launch --config pair.toml --calibration results/calibration.json" \
#     deploy/calibrations/measure.sh start calibrate compare overhead trials
#
# start      the pair and the router; what the doctor says
# calibrate  the line. More PASSES or LEVELS later on add to what is there
# compare    live: one server, the other, the pair; LOADS, or below, at and above the line
# changing   the same under a load that steps from below the line to above it
# adaptive   a sweep of the speculative server alone, as a third curve (pairs/adaptive.toml) beside the
#            sweep.json of a calibration, CURVES
# overhead-varied, overhead-fixed, overhead-pinned
#            the baseline server direct and through the router, at OVERHEAD_LEVEL: with answers of varied
#            length; of one length; varied, with core PIN for the router alone. `overhead`: the first two
# controls   two GPUs: the pair, two speculative servers and two baseline servers, in turns at LOADS.
#            LAUNCH_CROSSED starts pairs/crossed.toml at CROSSED_SPECULATIVE and CROSSED_BASELINE
# trials     clients that leave, a killed server, SIGTERM: last, it ends the pair
# stop       ends the pair and whatever else was started
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=${PYTHON:-python3}
RESULTS=$(realpath -m "${RESULTS:-results}"); mkdir -p "$RESULTS"
LAUNCH=${LAUNCH:?the command that starts the pair and the router, as in the head of this file}
LAUNCH_CROSSED=${LAUNCH_CROSSED:-}
SPECULATIVE=${SPECULATIVE:-http://127.0.0.1:31000}; BASELINE=${BASELINE:-http://127.0.0.1:30000}
CROSSED_SPECULATIVE=${CROSSED_SPECULATIVE:-http://127.0.0.1:31001}
CROSSED_BASELINE=${CROSSED_BASELINE:-http://127.0.0.1:30001}
ROUTER=${ROUTER:-http://127.0.0.1:8000}; ADMIN=${ADMIN:-http://127.0.0.1:9400}
LEVELS=${LEVELS:-8,32,64,96,128,192}; PASSES=${PASSES:-2}
IN=${IN:-64}; OUT_TOKENS=${OUT_TOKENS:-256}; SECONDS_EACH=${SECONDS_EACH:-6}
CALIBRATE_MORE=${CALIBRATE_MORE:-}
POLICIES=${POLICIES:-baseline,speculative,frontier}; LOADS=${LOADS:-}
COMPARE_SECONDS=${COMPARE_SECONDS:-60}; COMPARE_PASSES=${COMPARE_PASSES:-1}; COMPARE_WARM_UP=${COMPARE_WARM_UP:-12}
CURVES=${CURVES:-$RESULTS/sweeps/in-${IN%%,*}/sweep.json}
OVERHEAD_LEVEL=${OVERHEAD_LEVEL:-128}; OVERHEAD_SECONDS=${OVERHEAD_SECONDS:-30}; OVERHEAD_ROUNDS=${OVERHEAD_ROUNDS:-3}
PIN=${PIN:-}; VARIED=$(( OUT_TOKENS / 2 ))-$(( OUT_TOKENS * 3 / 2 ))
CALIBRATION=${CALIBRATION:-$RESULTS/calibration.json}
began=$(date +%s)
say() { echo "[$(( $(date +%s) - began )) s] $*"; }
bounded() { # SECONDS: at most these, and at most what is left of WITHIN
  local left=$(( began + ${WITHIN:-999999} - $(date +%s) )); [ "$1" -le "$left" ] && left=$1
  echo $(( left > 0 ? left : 0 ))
}
port() { local rest=${1##*:}; echo "${rest%%/*}"; }

up() { # PIDFILE ROUTER ADMIN: until the router there uses both servers, or whoever starts it is gone
  local i; for i in $(seq 600); do
    curl -sf -m 2 -o /dev/null "$2/ready" && [ "$(usable "$3")" = 2 ] && return 0
    kill -0 "$(cat "$1")" 2>/dev/null || return 1
    sleep 0.5
  done; return 1
}
usable() { # how many of the two servers the router at this admin listener uses
  curl -s -m 5 -H "authorization: Bearer ${LOADTEST_ADMIN_KEY:-}" "$1/status" \
    | "$PYTHON" -c 'import json,sys; print(sum(b["usable"] for b in json.load(sys.stdin)["backends"]))' 2>/dev/null
}
started() { # NAME ROUTER ADMIN COMMAND...: in the background, unless it runs already
  local name=$1 router=$2 admin=$3; shift 3
  [ -f "$RESULTS/$name.pid" ] && kill -0 "$(cat "$RESULTS/$name.pid")" 2>/dev/null && return 0
  setsid nohup "$@" >"$RESULTS/$name.log" 2>&1 </dev/null &
  echo $! >"$RESULTS/$name.pid"
  up "$RESULTS/$name.pid" "$router" "$admin" && return 0
  say "$name did not start"; tail -n 40 "$RESULTS/$name.log" | cut -c1-300; return 1
}
ended() { # NAME: SIGTERM, and wait for its end
  local file=$RESULTS/$1.pid pid i; [ -f "$file" ] || return 0
  pid=$(cat "$file"); kill -TERM "$pid" 2>/dev/null
  for i in $(seq 240); do kill -0 "$pid" 2>/dev/null || break; sleep 0.5; done
  rm -f "$file"
}
in_force() { # until the router has taken up the calibration that was just written
  local i made; made=$("$PYTHON" -c 'import json,sys; print(json.load(open(sys.argv[1]))["created"])' "$CALIBRATION") || return 1
  for i in $(seq "$(( 2 * $(bounded 30) ))"); do
    curl -s -m 5 -H "authorization: Bearer ${LOADTEST_ADMIN_KEY:-}" "$ADMIN/status" | grep -q "\"created\": *\"$made\"" && return 0
    sleep 0.5
  done; return 1
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
kept() { # SECONDS LOG COMMAND...: bounded, its output in a file, the end of it shown
  local limit log=$RESULTS/$2.log; limit=$(bounded "$1"); shift 2
  [ "$limit" -gt 0 ] || { say "out of time"; return 1; }
  timeout "$limit" "$@" >>"$log" 2>&1; say "exit code $?"; tail -n "${TAIL:-16}" "$log" | cut -c1-400
}
live() { # SECONDS LOG OUT ROUTER ADMIN POLICIES ARGUMENTS...
  local limit=$1 log=$2 out=$3 router=$4 admin=$5 policies=$6; shift 6
  kept "$limit" "$log" "$PYTHON" -m loadtest compare --live --url "$router" --admin-url "$admin" --policies "$policies" \
    --seconds "$COMPARE_SECONDS" --warm-up "$COMPARE_WARM_UP" --out "$out" "$@"
}
overhead() { # SECONDS NAME LENGTHS
  TAIL=18 kept "$1" "$2" "$PYTHON" -m loadtest overhead --direct "$BASELINE" --role baseline --url "$ROUTER" --admin-url "$ADMIN" \
    --level "$OVERHEAD_LEVEL" --rounds "$OVERHEAD_ROUNDS" --seconds "$OVERHEAD_SECONDS" --input-tokens "$IN" \
    --output-tokens "$3" --out "$RESULTS/$2"
}
controls() { # SECONDS: each load, each arm in turn; each pass begins with another arm
  local end=$(( $(date +%s) + $(bounded "$1") )) load pass at arm name router admin policy
  local arms=("pair $ROUTER $ADMIN frontier" "pair $ROUTER $ADMIN least-in-flight"
    "two-speculative http://127.0.0.1:8002 http://127.0.0.1:9402 least-in-flight"
    "two-baseline http://127.0.0.1:8003 http://127.0.0.1:9403 least-in-flight")
  [ -n "$LAUNCH_CROSSED" ] || { say "controls want LAUNCH_CROSSED"; return 1; }
  started crossed http://127.0.0.1:8001 http://127.0.0.1:9401 $LAUNCH_CROSSED || return 1
  started two-speculative http://127.0.0.1:8002 http://127.0.0.1:9402 "$PYTHON" -m router serve --policy least-in-flight \
    --speculative "$SPECULATIVE" --baseline "$CROSSED_SPECULATIVE" --port 8002 --admin-port 9402 || return 1
  started two-baseline http://127.0.0.1:8003 http://127.0.0.1:9403 "$PYTHON" -m router serve --policy least-in-flight \
    --speculative "$CROSSED_BASELINE" --baseline "$BASELINE" --port 8003 --admin-port 9403 || return 1
  for pass in $(seq "$COMPARE_PASSES"); do
    for load in $(tr , ' ' <<<"${LOADS:-$(around)}"); do
      for at in 0 1 2 3; do
        read -r name router admin policy <<<"${arms[$(( (at + pass - 1) % 4 ))]}"
        [ $(( end - $(date +%s) )) -gt 5 ] || { say "out of time"; break 3; }
        TAIL=1 live $(( end - $(date +%s) )) controls "$RESULTS/controls/$name.$policy-$load" "$router" "$admin" "$policy" \
          --loads "$load" --passes "$pass" --input-tokens "$IN" --output-tokens "$OUT_TOKENS"
      done
    done
  done
  "$PYTHON" "$HERE/together.py" "$RESULTS/controls" | tee "$RESULTS/controls/table.md"
}

for part in "$@"; do
  name=${part%%=*}; limit=3600; [ "$name" = "$part" ] || limit=${part#*=}
  say "$name"
  case $name in
    start)
      started launch "$ROUTER" "$ADMIN" $LAUNCH || exit 1
      "$PYTHON" -m router doctor --speculative "$SPECULATIVE" --baseline "$BASELINE" --json >"$RESULTS/doctor.json"
      say "doctor: exit code $?" ;;
    calibrate)
      kept "$limit" calibrate "$PYTHON" -m loadtest calibrate --speculative "$SPECULATIVE" --baseline "$BASELINE" \
        --levels "$LEVELS" --passes "$PASSES" --seconds "$SECONDS_EACH" --most-seconds $(( SECONDS_EACH + 3 )) --warm-up 1.5 \
        --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --anyway $CALIBRATE_MORE --work "$RESULTS/sweeps" --out "$CALIBRATION"
      in_force || say "the router does not decide by $CALIBRATION" ;;
    compare)
      TAIL=40 live "$limit" compare "$RESULTS/compare" "$ROUTER" "$ADMIN" "$POLICIES" --loads "${LOADS:-$(around)}" \
        --passes "$COMPARE_PASSES" --input-tokens "$IN" --output-tokens "$OUT_TOKENS" ;;
    changing)
      [ -f "$RESULTS/changing.csv" ] || "$PYTHON" "$HERE/changing.py" "$CALIBRATION" "$RESULTS/changing.csv" \
        --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --step "${STEP:-20}"
      TAIL=20 live "$limit" changing "$RESULTS/changing" "$ROUTER" "$ADMIN" "$POLICIES" --trace "$RESULTS/changing.csv" \
        --passes "$COMPARE_PASSES" ;;
    adaptive)
      kept "$limit" adaptive "$PYTHON" -m loadtest sweep --url "$SPECULATIVE" --role speculative --levels "$LEVELS" \
        --passes "$PASSES" --seconds "$SECONDS_EACH" --most-seconds $(( SECONDS_EACH + 3 )) --warm-up 1.5 \
        --input-tokens "$IN" --output-tokens "$OUT_TOKENS" --out "$RESULTS/adaptive"
      if [ -f "$CURVES" ]; then
        TAIL=24 kept 120 adaptive-compared "$PYTHON" -m loadtest compare --scale "${ADAPTIVE_SCALE:-4}" --shape steps \
          --curves "base=$CURVES,spec=$CURVES,adaptive=$RESULTS/adaptive/sweep.json"
      fi ;;
    overhead) overhead "$limit" overhead-varied "$VARIED"; overhead "$limit" overhead-fixed "$OUT_TOKENS" ;;
    overhead-varied) overhead "$limit" "$name" "$VARIED" ;;
    overhead-fixed) overhead "$limit" "$name" "$OUT_TOKENS" ;;
    overhead-pinned)
      others="$(port "$SPECULATIVE") $(port "$BASELINE")"
      "$PYTHON" "$HERE/pin.py" "$(port "$ROUTER")" "${PIN:?a core for the router}" $others && overhead "$limit" "$name" "$VARIED"
      "$PYTHON" "$HERE/pin.py" "$(port "$ROUTER")" all $others ;;
    controls) controls "$limit" ;;
    trials)
      timeout "$(bounded "$limit")" "$PYTHON" -m tests.real_pair --url "$ROUTER" --admin-url "$ADMIN" --speculative "$SPECULATIVE" \
        --baseline "$BASELINE" --launcher "$(cat "$RESULTS/launch.pid")" --json "$RESULTS/trials.json" ${TRIALS:-} \
        2>&1 | tee "$RESULTS/trials.log" ;;
    stop) for each in two-speculative two-baseline crossed launch; do ended "$each"; done ;;
    *) echo "measure.sh: no such part: $name" >&2; exit 2 ;;
  esac
done
say end
