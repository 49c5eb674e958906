# What scripts for a guest with devices of ublk begin with. SUCCESS stands for what a guest says in the end.
export PATH=/bin:/tmp/bin HOME=/tmp
busybox mkdir /tmp/bin; busybox --install -s /tmp/bin
mkdir -p /tmp/run
fail() { echo "wrong: $1"; tail -5 /tmp/log; dmesg | tail -20; poweroff -nf; sleep 60; }
second() { cut -d' ' -f1 /proc/uptime; }
say() { echo "$(second) s: $1"; }
control=unix:/tmp/control.sock
ctl() { blkmq ctl --socket $control "$@"; }
# serve WORDS: starts a daemon, and waits until it serves.
serve() {
  rm -f /tmp/out; blkmq serve --control $control "$@" > /tmp/out 2>> /tmp/log & server=$!
  for turn in $(seq 600); do
    grep -qs ready /tmp/out && return
    kill -0 $server 2>/dev/null || fail "the daemon has ended: serve $*"
    usleep 50000
  done
  fail "the daemon is not ready: serve $*"
}
# refuse TEXT WORDS: a daemon that does not start says this.
refuse() {
  text=$1; shift
  timeout 30 blkmq serve "$@" > /tmp/refused 2>&1 && fail "started: serve $*"
  grep -q "$text" /tmp/refused || { cat /tmp/refused; fail "not said: $text"; }
}
stop() { kill $server; wait $server || fail "the daemon has ended with $?"; }
verify="--ioengine=io_uring --direct=1 --verify=crc32c --verify_fatal=1 --verify_dump=0 --thread --minimal"

echo "Linux $(uname -r), $(nproc) processors"
