#!/bin/sh
# Become one SGLang server of the pair, inside SGLang's own image.
#
#   engine.sh speculative|baseline [more flags of SGLang]
#
# What a Compose file cannot say is here: flags that depend on other settings. All of them come from
# the environment (.env.example says which); the flags that make the pair are in deploy/sglang/.
# It ends in exec, so that SGLang is process 1 and gets SIGTERM itself. Exit code 2: bad settings.
set -euf # no file names are made of what a setting says: [1] and * are text

die() { echo "engine.sh: $*" >&2; exit 2; }

role=${1:-}
case $role in
  speculative) port=31000 ;;
  baseline) port=30000 ;;
  *) die "the first argument is speculative or baseline, not '$role'" ;;
esac
shift

# The example of SGLang's own documentation. The model is gated: HF_TOKEN has to have access to it.
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
DRAFT=${DRAFT:-jamesliu1/sglang-EAGLE3-Llama-3.1-Instruct-8B}

case ${GPU_LAYOUT:-shared} in
  shared) gpus=${GPUS:-0} share=${GPU_SHARE:-0.42} ;;
  split)
    share=${GPU_SHARE:-}
    if [ "$role" = speculative ]; then gpus=${SPECULATIVE_GPUS:-0}; else gpus=${BASELINE_GPUS:-1}; fi
    ;;
  *) die "GPU_LAYOUT is shared (both servers on the same GPUs) or split (GPUs of their own), not '$GPU_LAYOUT'" ;;
esac
case $gpus in
  *[!0-9,]* | '' | ,* | *, | *,,*) die "GPUs are named by number, as in 0 or 0,1, not '$gpus'" ;;
esac
count=$(echo "$gpus" | tr ',' '\n' | wc -l | tr -d ' ')

# Set in this order: a later flag wins, so what the user adds comes last.
set -- ${SGLANG_FLAGS:-} "$@"
[ -z "${CROSSOVER_BACKEND_API_KEY:-}" ] || set -- --api-key "$CROSSOVER_BACKEND_API_KEY" "$@"

# --mem-fraction-static is a share of the memory that is *free when this process starts*. Given as it
# is, the second server would get a share of a share, and a server that comes back beside a running
# one less than it had. So a share of the whole GPU is meant here, and turned into that fraction.
if [ -n "$share" ]; then
  case $share in
    *[!0-9.]* | *.*.* | .) die "GPU_SHARE is a part of the whole memory, as in 0.42, not '$share'" ;;
  esac
  fraction=$(nvidia-smi -i "$gpus" --query-gpu=memory.total,memory.free --format=csv,noheader,nounits |
    awk -F', *' -v share="$share" '
      $2 + 0 <= 0 { next }
      { fraction = share * $1 / $2; if (fraction > most) most = fraction; seen = 1 }
      END { if (!seen) exit 1; printf "%.3f %.0f", most, most * 1000 }') ||
    die "nvidia-smi does not say how much memory GPU $gpus has: are the NVIDIA container toolkit and the GPU there?"
  [ "${fraction#* }" -le 970 ] ||
    die "GPU $gpus has too little free memory for a share of $share: stop what else runs there, or set GPU_SHARE"
  [ "${fraction#* }" -ge 1 ] || die "GPU_SHARE=$share is no memory at all"
  set -- --mem-fraction-static "${fraction% *}" "$@"
fi
[ "$count" -eq 1 ] || set -- --tensor-parallel-size "$count" "$@"
[ "$role" = baseline ] || set -- --speculative-draft-model-path "$DRAFT" "$@"

export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="$gpus"
exec python3 -m sglang.launch_server --config "/etc/crossover/sglang/$role.yaml" \
  --host 0.0.0.0 --port "$port" --model-path "$MODEL" "$@"
