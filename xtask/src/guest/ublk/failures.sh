# What a guest does to devices of ublk while daemons fail, in an upgrade and in a recovery, and while memory is short.
truncate -s 64M /tmp/vm1.raw
truncate -s 320M /tmp/vm2.raw
upgrade=unix:/tmp/upgrade.sock
disks="--disk name=vm1,file=/tmp/vm1.raw,sched=bfq --disk name=vm2,file=/tmp/vm2.raw --upgrade-socket $upgrade"
address() { printf '[[export]]\nublk = "%s"\ndisks = ["%s"]\n' $1 $2; }
(address 0 vm1; address 7 vm2) > /tmp/both.toml
address 0 vm1 > /tmp/one.toml
both="$disks --config /tmp/both.toml"

# ended: how many requests the loaded device has ended.
ended() { awk '{print $1 + $5}' /sys/block/ublkb0/stat; }
# goes_on WHEN: what was under load is served.
goes_on() {
  before=$(ended)
  for turn in $(seq 400); do
    kill -0 $load || { cat /tmp/fio.load; fail "the load has ended, $1"; }
    kill -0 $files || fail "the files have ended, $1"
    test $(ended) -gt $((before + 20)) && return
    usleep 50000
  done
  fail "nothing is served, $1"
}
kill_server() { kill -9 $server; wait $server 2>/dev/null; }

serve $both
mkfs.xfs -q /dev/ublkb7 && mount -t xfs /dev/ublkb7 /mnt || fail 'mount of xfs'
touch /tmp/loaded
fio --name=load --filename=/dev/ublkb0 --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=48M --loops=10000 --verify_backlog=256 --numjobs=1 $verify > /tmp/fio.load 2>&1 & load=$!
( turn=0
  while test -e /tmp/loaded; do
    dd if=/dev/urandom of=/tmp/content bs=256k count=8 2>/dev/null
    dd if=/tmp/content of=/mnt/$((turn % 5)) bs=64k conv=fsync 2>/tmp/err || { cat /tmp/err; exit 1; }
    dd if=/mnt/$((turn % 5)) bs=64k iflag=direct 2>/tmp/err | cmp - /tmp/content || { cat /tmp/err; exit 1; }
    turn=$((turn + 1))
  done; echo "$turn files were written to xfs and compared" ) & files=$!
goes_on 'before anything fails'

# A second daemon that may not take over says why, and the first one goes on.
first=$server
refuse 'nobody serves ublk at ublk:7 here' $disks --config /tmp/one.toml --control $control --take-over $upgrade
goes_on 'after an upgrade without one of the devices'
refuse 'is read-only in the new configuration' --disk name=vm1,file=/tmp/vm1.raw,ro=on --disk name=vm2,file=/tmp/vm2.raw --config /tmp/both.toml --control $control --take-over $upgrade
goes_on 'after an upgrade to a disk that cannot be written'
say 'two upgrades were refused'

# A second daemon that is killed: the first one goes on, or has ended, and a third one finds what was left.
kept=0; left=0; moment=0
while test $left -lt 4 -a $moment -lt 10000; do
  moment=$((moment + 40 + moment / 10))
  blkmq serve --control $control $both --take-over $upgrade > /tmp/out.second 2>> /tmp/log & second=$!
  usleep $((moment * 1000)); kill -9 $second; wait $second 2>/dev/null
  sleep 1
  if kill -0 $server 2>/dev/null; then kept=$((kept + 1)); else left=$((left + 1)); serve $both; fi
  goes_on "after a second daemon was killed $moment ms after its start"
done
test $kept -gt 3 -a $left -gt 3 || fail "the moments were not before and after the first one has ended: $kept, $left"
say "second daemons were killed: the first one went on $kept times, and had ended $left times"

rm /tmp/loaded; wait $files || fail 'files'
kill -INT $load; wait $load
grep -q 'verify:\|err=\|error' /tmp/fio.load && { cat /tmp/fio.load; fail 'the load has failed'; }
say "the load: $(cut -d';' -f47 /tmp/fio.load | tail -1) KiB written and verified"
umount /mnt && xfs_repair -n /dev/ublkb7 > /tmp/fsck 2>&1 || { cat /tmp/fsck; fail xfs_repair; }
stop

# A daemon that is killed while it takes over what another one has left: the next one takes it over, or says that the kernel gives it
# to nobody any more. Each time with a device of its own.
recover() {
  disk="--disk name=left,file=/tmp/left$1.raw --ublk $((20 + $1))"
  truncate -s 8M /tmp/left$1.raw
  serve $disk
  fio --name=left --filename=/dev/ublkb$((20 + $1)) --rw=randwrite --bs=4k --iodepth=8 --size=8M --time_based --runtime=4 $verify > /tmp/fio.left 2>&1 & left=$!
  sleep 0.5; kill -9 $server; wait $server 2>/dev/null
  : > /tmp/log.second
  blkmq serve --control $control $disk > /tmp/out.second 2> /tmp/log.second & second=$!
  for look in $(seq 1000); do grep -q 'found as it was left' /tmp/log.second && break; done
  usleep $(($2 * 1000)); kill -9 $second; wait $second 2>/dev/null
  grep -q ready /tmp/out.second && when=after || when=before
  blkmq serve --control $control $disk > /tmp/out 2> /tmp/log.third & server=$!
  until grep -qs ready /tmp/out; do kill -0 $server 2>/dev/null || break; usleep 20000; done
  if grep -q ready /tmp/out; then
    wait $left || { cat /tmp/fio.left; fail "the load has failed after recovery $1"; }
    stop; outcomes="$outcomes $2 ms, $when: recovered;"
  else
    grep -q 'the kernel gives it to no other' /tmp/log.third || { cat /tmp/log.third; fail "recovery $1 is not refused by name"; }
    outcomes="$outcomes $2 ms, $when: refused;"
  fi
}
outcomes=
for turn in $(seq 0 11); do recover $turn $((turn * turn * 2)); done
say "killed so long after a device was found:$outcomes"

# The daemon and who writes share a control group with little memory. The image is there before, outside of it.
dd if=/dev/zero of=/tmp/vm3.raw bs=1M count=192 2>/dev/null
dd if=/dev/urandom of=/tmp/content bs=1M count=8 2>/dev/null
many() { for part in $(seq 18); do cat /tmp/content; done; }
groups=/tmp/groups; small=$groups/small
mkdir $groups && mount -t cgroup2 none $groups && echo '+memory +io' > $groups/cgroup.subtree_control || fail 'no control groups'
serve --disk name=vm3,file=/tmp/vm3.raw --ublk 3
mkfs.ext4 -q -E nodiscard /dev/ublkb3 && mount -t ext4 /dev/ublkb3 /mnt || fail 'mount of ext4'
mkdir $small; echo 48M > $small/memory.max; echo $server > $small/cgroup.procs
begun=$(second)
( echo 0 > $small/cgroup.procs; many > /mnt/file && sync && touch /tmp/written ) & writer=$!
for turn in $(seq 1200); do test -e /tmp/written && break; kill -0 $writer 2>/dev/null || break; usleep 100000; done
test -e /tmp/written || { cat $small/memory.events; fail 'what does not fit into memory is not written back'; }
took=$(echo "$(second) $begun" | awk '{print $1 - $2}')
echo 3 > /proc/sys/vm/drop_caches
many | cmp - /mnt/file || fail 'what was written back differs'
say "a group of 48 MiB has written 144 MiB in $took s"
umount /mnt && e2fsck -fn /dev/ublkb3 > /tmp/fsck 2>&1 || { cat /tmp/fsck; fail e2fsck; }
stop
dmesg | grep -v MP-BIOS | grep -i 'warn\|bug:' && fail 'the kernel warns'
busybox echo SUCCESS
