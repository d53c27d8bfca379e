# shellcheck shell=bash
# --- which libcuda the ranks get: the host's, or the image's own (cuda-compat) if the node's driver is too old for
# the image. The image's entry point would decide this, but `exec` does not run it.
nvidia=${SLURMDDP_NVIDIA:-/proc/driver/nvidia}
driver=
gpu=
if [[ -r "$nvidia/version" ]]; then
  while read -r line; do
    if [[ "$line" =~ Kernel\ Module(\ +for\ +[[:alnum:]_-]+)?\ +([0-9]+(\.[0-9]+)+) ]]; then
      driver=${BASH_REMATCH[2]}
      break
    fi
  done <"$nvidia/version"
fi
for file in "$nvidia"/gpus/*/information; do
  [[ -z "$gpu" && -r "$file" ]] || continue
  while IFS=: read -r key line; do
    [[ "$key" != Model ]] || read -r gpu <<<"$line"
  done <"$file"
done
if [[ -z "$driver" ]] && command -v nvidia-smi >/dev/null; then
  IFS=', ' read -r driver line < <(timeout 60 nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>/dev/null) || true
  if [[ "$driver" =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
    gpu=${gpu:-$line}
  else
    driver= # its error message
  fi
fi
# It runs in the container, before the ranks' command, and becomes that (`exec`). Only there are the image's own
# variables and libraries to be seen. The image's LD_LIBRARY_PATH stays, ours goes in front.
IFS= read -r -d '' choose_libcuda <<'END' || true
older() { # whether version $1 is older than $2; fields count as numbers
  a=$1 b=$2
  while [ -n "$a$b" ]; do
    x=${a%%.*} y=${b%%.*}
    [ "${x:-0}" -eq "${y:-0}" ] || { [ "${x:-0}" -lt "${y:-0}" ]; return; }
    case $a in *.*) a=${a#*.} ;; *) a= ;; esac
    case $b in *.*) b=${b#*.} ;; *) b= ;; esac
  done
  return 1
}
version() { # whether it is one
  case $1 in '' | *[!0-9.]* | .* | *. | *..*) return 1 ;; *.*) ;; *) return 1 ;; esac
}
works() { # whether NVIDIA's own check, which its images bring, finds that the compat libraries run on this GPU
  check=cudaCheck
  ! command -v timeout >/dev/null 2>&1 || check="timeout 60 cudaCheck"
  said=$(LD_LIBRARY_PATH=$compat${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} $check 2>/dev/null | head -n 1)
  [ "$said" = "CUDA Driver OK" ]
}
without_compat() { # LD_LIBRARY_PATH without the folders of compat libraries: a newer driver gives error 803 with them
  kept='' all=${LD_LIBRARY_PATH-}
  set -f
  IFS=:
  for folder in $all; do
    case $folder in
      */compat | */compat/*)
        if [ -e "$folder/libcuda.so.1" ]; then
          all=
          continue
        fi ;;
    esac
    kept=$kept${kept:+:}$folder
  done
  printf '%s' "${all:-$kept}"
}
decide() { # host, driver, GPU: prints the LD_LIBRARY_PATH that is right here, and says why on descriptor 3
  host=$1 driver=$2 gpu=$3 compat='' bundled='' floor='' path=${LD_LIBRARY_PATH-}
  for folder in "${_CUDA_COMPAT_PATH:-/usr/local/cuda/compat}/lib.real" "${_CUDA_COMPAT_PATH:-/usr/local/cuda/compat}"; do
    if [ -n "$compat" ] || [ ! -e "$folder/libcuda.so.1" ]; then continue; fi
    compat=$folder
    bundled=$(readlink -f "$folder/libcuda.so.1")
    bundled=${bundled##*libcuda.so.}
  done
  version "$bundled" || bundled=${CUDA_DRIVER_VERSION:-}
  version "$bundled" || bundled=
  case ${CUDA_VERSION:-} in # the least driver of each CUDA major: containers/tables/cuda-compat.yaml
    11.*) floor=450.80.02 ;;
    12.*) floor=525.60.13 ;;
    13.*) floor=580 ;;
  esac
  choice="left as the image has them"
  if ! version "$driver"; then
    verdict="the driver is unknown"
  elif [ -n "$bundled" ] && ! older "$driver" "$bundled"; then
    verdict=native choice=off
    path=$(without_compat)
  elif [ -n "$floor" ] && ! older "$driver" "$floor"; then
    verdict="minor-version compatibility (CUDA ${CUDA_VERSION%%.*}.x from driver $floor on)"
    [ -n "$bundled" ] || verdict="$verdict at least"
  elif [ -z "$compat" ]; then
    verdict=unknown
    [ -z "$floor" ] || verdict="impossible: CUDA ${CUDA_VERSION%%.*}.x needs driver $floor or newer"
  else
    case ${floor:+known}:$gpu in
      known:*GeForce* | known:*TITAN*)
        verdict="impossible: forward compatibility is not for $gpu" choice=off ;;
      *)
        if command -v cudaCheck >/dev/null 2>&1; then
          if works; then
            verdict="forward compatibility, by the image's own check" choice=on
          else
            verdict="impossible: the compat libraries do not run here, the image's own check says '$said'" choice=off
          fi
        elif [ -n "$floor" ]; then # without them it fails for sure
          verdict="forward compatibility (the driver is older than $floor), which data-center GPUs have" choice=on
        else
          verdict=unknown
        fi ;;
    esac
    [ "$choice" != on ] || path=$compat${path:+:$path}
  fi
  if [ -n "$compat" ]; then choice="$choice ($compat)"; else choice="none in the image"; fi
  printf 'slurmddp: node %s: NVIDIA driver %s, %s; image: CUDA %s, driver %s; %s; compat libraries %s\n' "$host" \
    "${driver:-?}" "${gpu:-GPU ?}" "${CUDA_VERSION:-?}" "${bundled:-?}" "$verdict" "$choice" >&3
  printf '%s' "$path"
}
{ set -- "$(decide "$1" "$2" "$3")" "$@"; } 3>&1
if [ "$1" != "${LD_LIBRARY_PATH-}" ]; then
  LD_LIBRARY_PATH=$1
  export LD_LIBRARY_PATH
fi
shift 4
exec "$@"
END
container+=(/bin/sh -c "$choose_libcuda" slurmddp-libcuda "$host" "$driver" "$gpu")
