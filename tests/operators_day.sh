#!/usr/bin/env bash
# An operator's whole day on the local cloud, with fleetctl alone and no edited file: from an empty account to a receipt
# and to nothing left that was not announced. `make day`; about four minutes on two idle cores.
set -euo pipefail
fleetctl=$(realpath "${1:-.venv/bin/fleetctl}")
folder=$(mktemp -d)
cd "$folder"
cloud=""
export XDG_CACHE_HOME="$folder/cache"  # another local cloud has instances of the same ids, with other host keys
trap 'kill $(jobs -p) 2>/dev/null || true; [ -z "$cloud" ] || wait "$cloud" 2>/dev/null || true; rm -rf "$folder"' EXIT

say() { printf '\n== %s\n' "$*"; }
ask() { "$fleetctl" "$@" --output json; }                       # JSON of a verb
get() { python3 -c 'import json, sys; d = json.load(sys.stdin); print(eval(sys.argv[1]))' "$1"; }
die() { echo "operators_day: $*" >&2; exit 1; }

cat > train.py <<'PYTHON'
import json, os, pathlib, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
folder = pathlib.Path(os.environ["SPOTHEAL_CHECKPOINT_DIR"])
progress = pathlib.Path(os.environ["SPOTHEAL_PROGRESS_FILE"])
metrics = open(os.environ["SPOTHEAL_METRICS_FILE"], "a", buffering=1)
total = 160
step = max((int(one.name[5:]) for one in folder.glob("step-*")), default=0)
def tell(saved):
    body = {"step": step, "steps_total": total, "loss": 1 / (step + 1), "saved": saved}
    beside = progress.with_suffix(".new")
    beside.write_text(json.dumps(body))
    beside.rename(progress)
def save():
    beside = folder / ".new"
    with open(beside, "w") as file:
        file.write(str(step)); file.flush(); os.fsync(file.fileno())
    path = folder / f"step-{step}"
    beside.rename(path)
    tell({"step": step, "path": str(path), "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())})
tell(None)
while step < total and not stop:
    time.sleep(0.4)
    step += 1
    print(f"step {step}", flush=True)
    metrics.write(json.dumps({"step": step, "loss": 1 / (step + 1), "accuracy": step / total}) + "\n")
    if step % 10 == 0:
        save()
save()
if stop:
    sys.exit(75)
pathlib.Path(os.environ["SPOTHEAL_RESULTS_DIR"], "model.txt").write_text(str(step))
PYTHON
git init -q . && git add train.py && git -c user.name=me -c user.email=me@example.org commit -qm "a trainer"
printf '*\n' > .git/info/exclude                                  # what this script leaves beside it is no work of ours

say "an empty account"
"$fleetctl" cloud --env "$folder/cloud.env" > cloud.log 2>&1 & cloud=$!
until [ -f cloud.env ]; do sleep 0.2; kill -0 "$cloud" || die "the local cloud did not start: $(cat cloud.log)"; done
# shellcheck disable=SC1091
. ./cloud.env

say "init, validate, request --wait"
"$fleetctl" init --command "python train.py" --gpus 0 --name day
"$fleetctl" validate
"$fleetctl" request --yes --wait --timeout 20m > wait.out 2> wait.err & waiting=$!
until [ "$(ask status 2>/dev/null | get '(d["progress"] or {}).get("step") or 0' 2>/dev/null || echo 0)" -ge 20 ]; do
    kill -0 "$waiting" || die "the request ended: $(tail -5 wait.err)"; sleep 2
done

say "status, and a shell on the instance"
"$fleetctl" status
"$fleetctl" ssh day --wait --timeout 2m -- true || die "no shell on the instance"

say "logs -f while the instance is taken away"
"$fleetctl" logs --follow --source trainer > steps.log 2> logs.err & following=$!
"$fleetctl" cloud interrupt --seconds 60
wait "$waiting" || die "request --wait ended with $?: $(tail -5 wait.err)"
tail -1 wait.err
wait "$following" || die "logs -f ended with $?: $(tail -5 logs.err)"
python3 - steps.log <<'PYTHON'
import re, sys
steps = [int(found.group(1)) for found in re.finditer(r"step (\d+)", open(sys.argv[1]).read())]
assert steps == sorted(set(steps)) and steps[-1] == 160 and len(steps) == steps[-1] - steps[0] + 1, steps
print(f"steps {steps[0]} to {steps[-1]}, each once")
PYTHON

say "receipt and results"
"$fleetctl" report --out report.html
grep -q "<svg" report.html || die "the report has no pictures"
if grep -qE '(src|href)="https?:' report.html; then die "the report loads from elsewhere"; fi
[ "$(ask report | get 'd["steps"]["lost"] if "lost" in d.get("steps", {}) else 0')" = 0 ] || die "steps were lost"
"$fleetctl" logs day --store | grep -q "the run is over" || die "the store has no log of the agent"
"$fleetctl" logs day --story | grep -q "Ready(" || die "the store has no story of how the volume was healed"
"$fleetctl" status --watch --timeout 5m
"$fleetctl" results ls --only "model*"
"$fleetctl" results get --to fetched --only model.txt
[ "$(cat fetched/model.txt)" = 160 ] || die "the result is another"

say "the end: nothing is at work, and what is left is deleted on one yes"
"$fleetctl" cancel --yes
"$fleetctl" clean day --store --all --yes
"$fleetctl" iam delete --yes
ask cloud state > state.json 2>/dev/null || "$fleetctl" cloud state > state.json
get '[v["id"] for v in d["volumes"]]' < state.json | grep -qx '\[\]' || die "volumes are left: $(cat state.json)"
get '[s["id"] for s in d["snapshots"]]' < state.json | grep -qx '\[\]' || die "snapshots are left"
get '[i["id"] for i in d["instances"] if i["state"] != "terminated"]' < state.json | grep -qx '\[\]' || die "instances are left"
say "the day has passed"
