# What a guest does to devices of ublk. KILLS is a list with an entry for each kill.
truncate -s 192M /tmp/vm1.raw
truncate -s 64M /tmp/vm2.raw /tmp/vm3.raw

rmmod ublk_drv
refuse 'modprobe ublk_drv' --disk name=vm1,file=/tmp/vm1.raw --ublk 0
insmod /ublk-drv.ko || fail insmod
serve --disk name=vm1,file=/tmp/vm1.raw --ublk 0
grep -q 'device: /dev/ublkb0' /tmp/out || fail 'no line for clients'
refuse 'is served by process' --disk name=vm1,ram=16M --ublk 0
refuse "another disk's" --disk name=other,ram=16M --ublk 0
queue=/sys/block/ublkb0/queue
say "ublkb0: $(cat /sys/block/ublkb0/size) sectors, $(ls /sys/block/ublkb0/mq | wc -l) queues, fua $(cat $queue/fua), $(cat $queue/write_cache), discard $(cat $queue/discard_max_bytes), zeroes $(cat $queue/write_zeroes_max_bytes)"
test "$(cat /sys/block/ublkb0/size) $(cat $queue/fua) $(ls /sys/block/ublkb0/mq | wc -l)" = "393216 1 2" || fail attributes

fio --name=verify --filename=/dev/ublkb0 --rw=randwrite --bsrange=512-256k --bs_unaligned=0 --iodepth=16 --size=64M $verify > /tmp/fio || fail 'fio verify'
cmp -n 67108864 /dev/ublkb0 /tmp/vm1.raw || fail 'the image differs'
say 'fio verify'

blocks() { stat -c %b /tmp/vm1.raw; }
test $(blocks) -gt 100000 || fail "blocks before: $(blocks)"
blkdiscard /dev/ublkb0 || fail blkdiscard
test $(blocks) -lt 1000 || fail "blocks after blkdiscard: $(blocks)"
mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/ublkb0 || fail mkfs.ext4
mount -t ext4 /dev/ublkb0 /mnt || fail mount
dd if=/dev/urandom of=/mnt/noise bs=1M count=64 conv=fsync 2>/dev/null
full=$(blocks); rm /mnt/noise; sync; fstrim /mnt || fail fstrim
test $(blocks) -lt $((full - 100000)) || fail "blocks before and after fstrim: $full, $(blocks)"

# An overwrite that is to be durable is one forced write, and no flush.
flushes() { awk '{print $16}' /sys/block/ublkb0/stat; }
overwrite="--filename=/mnt/file --rw=write --bs=4k --size=1M --direct=1 --ioengine=psync --overwrite=1 --minimal"
dd if=/dev/zero of=/mnt/file bs=1M count=1 conv=fsync 2>/dev/null; sync
before=$(flushes)
fio --name=forced $overwrite --sync=dsync > /tmp/fio || fail 'forced writes'
forced=$(($(flushes) - before)); before=$(flushes)
fio --name=synchronised $overwrite --fsync=1 > /tmp/fio || fail 'synchronised writes'
synced=$(($(flushes) - before))
test $forced -lt 10 -a $synced -ge 250 || fail "256 forced writes, $forced flushes; 256 synchronised ones, $synced"
umount /mnt && e2fsck -fn /dev/ublkb0 > /tmp/fsck 2>&1 || { cat /tmp/fsck; fail e2fsck; }
say "256 forced writes: $forced flushes; 256 synchronised ones: $synced; discards, a file system"

# Processor time of the daemon in units of 10 ms, and how often each of its threads has been woken.
spent() { awk '{print $14 + $15}' /proc/$server/stat; }
woken() { for task in /proc/$server/task/*; do echo "$(cat $task/comm) $(awk '/^voluntary/ {print $2}' $task/status)"; done | tr '\n' ';'; }
sleep 6; before=$(spent); wakes=$(woken); sleep 10
say "idle for 10 s: $(($(spent) - before)) ticks of 10 ms; woken: $wakes then $(woken)"

# Killed again and again, under a load that verifies what it has written, and under a file system on another device.
kill -9 $server; wait $server 2>/dev/null
disks="--disk name=vm1,file=/tmp/vm1.raw,sched=bfq --disk name=vm2,file=/tmp/vm2.raw --config /tmp/blkmq.toml"
cat > /tmp/blkmq.toml <<END
[[export]]
ublk = "0"
disks = ["vm1"]
[[export]]
ublk = "7"
disks = ["vm2"]
END
serve $disks
mkfs.ext4 -q /dev/ublkb7 && mount -t ext4 /dev/ublkb7 /mnt || fail 'mount of the second disk'
touch /tmp/loaded
fio --name=load --filename=/dev/ublkb0 --rw=randwrite --bsrange=4k-64k --iodepth=16 --size=48M --loops=10000 --verify_backlog=256 --numjobs=1 $verify > /tmp/fio.load 2>&1 & load=$!
( turn=0
  while test -e /tmp/loaded; do
    dd if=/dev/urandom of=/tmp/content bs=256k count=8 2>/dev/null
    dd if=/tmp/content of=/mnt/$((turn % 5)) bs=64k conv=fsync 2>/tmp/err || { cat /tmp/err; exit 1; }
    dd if=/mnt/$((turn % 5)) bs=64k iflag=direct 2>/tmp/err | cmp - /tmp/content || { cat /tmp/err; exit 1; }
    turn=$((turn + 1))
  done; echo "$turn files were written and compared" ) & files=$!
for kill in KILLS; do
  sleep 1
  kill -0 $load || { cat /tmp/fio.load; fail "the load has ended before kill $kill"; }
  kill -0 $files || fail "the files have ended before kill $kill"
  kill -9 $server; killed=$(second); wait $server 2>/dev/null
  serve $disks
  grep -q 'device: /dev/ublkb7' /tmp/out || fail 'not both are served'
done
say "killed $kill times, the last time for $(echo "$(second) $killed" | awk '{print $1 - $2}') s"

# Replaced under the same load.
upgrade=unix:/tmp/upgrade.sock
kill -9 $server; wait $server 2>/dev/null
serve $disks --upgrade-socket $upgrade
for upgrade_number in KILLS; do
  sleep 1; before=$server
  serve $disks --take-over $upgrade
  wait $before || fail "the first daemon has ended with $?"
done
sleep 2
say "replaced $upgrade_number times"

# Ended: what was written is there.
rm /tmp/loaded; wait $files || fail 'files'
kill -0 $load || { cat /tmp/fio.load; fail 'the load has ended'; }
kill -INT $load; wait $load
grep -q 'verify:\|err=\|error' /tmp/fio.load && { cat /tmp/fio.load; fail 'the load has failed'; }
say "the load: $(cut -d';' -f47 /tmp/fio.load | tail -1) KiB written and verified"

# Stopped while a file system is mounted: the device stays, and waits.
echo left > /mnt/left; stop
test -e /dev/ublkb7 -a ! -e /dev/ublkb0 || fail 'not the device alone stays that has a file system'
serve $disks
sync; echo 3 > /proc/sys/vm/drop_caches; grep -q left /mnt/left || fail 'what was written is lost'
umount /mnt && e2fsck -fn /dev/ublkb7 > /tmp/fsck 2>&1 || { cat /tmp/fsck; fail 'e2fsck after kills'; }

# Removed, added, stopped.
ctl remove export 7 || fail 'ctl remove export'
test -e /dev/ublkb7 && fail 'removed, and there'
ctl add export ublk=auto 'disks=["vm2"]' || fail 'ctl add export'
test -e /dev/ublkb1 || fail 'added, and not there'
ctl resize vm2 80M > /dev/null || fail resize
sleep 1; grep -q 'keeps its size' /tmp/log || fail 'nothing is said of the size'
stop
test -e /dev/ublkb0 -o -e /dev/ublkb1 -o -e /dev/ublkc0 && fail 'stopped, and there'
say 'removed, added, stopped'

# Served by a user: the nodes are his, as udev would have it.
mkdir -p /etc; echo 'root:x:0:0::/tmp:/tmp/bin/sh' > /etc/passwd; echo 'user:x:1000:1000::/tmp:/tmp/bin/sh' >> /etc/passwd
chmod 666 /dev/ublk-control; chown 1000 /tmp/vm3.raw

# Nobody gives him the nodes: no start succeeds, what was made stays, and soon no more is made. Given later, it goes.
words='exec /bin/blkmq serve --disk name=vm3,file=/tmp/vm3.raw --ublk auto'
for turn in 1 2 3 4 5 6; do
  su -s /tmp/bin/sh user -c "$words" > /tmp/refused 2>&1 && fail 'a user serves a device that is not given to him'
done
grep -q 'given to nobody' /tmp/refused || { cat /tmp/refused; fail 'not said: given to nobody'; }
test $(ls /dev | grep -c ublkc) = 4 || fail "devices that stay: $(ls /dev | grep ublkc)"
( while :; do chown 1000 /dev/ublkc* /dev/ublkb* 2>/dev/null; usleep 20000; done ) & udev=$!
sleep 1
su -s /tmp/bin/sh user -c "$words" > /tmp/user.out 2>> /tmp/log & server=$!
for turn in $(seq 400); do grep -qs ready /tmp/user.out && break; usleep 50000; done
grep -q ready /tmp/user.out || fail 'a user cannot serve when the devices are given to him'
test $(ls /dev | grep -c ublkc) = 1 || fail "devices that stay: $(ls /dev | grep ublkc)"
stop; kill $udev; rm /tmp/user.out
say 'a user without nodes'

( while :; do chown 1000 /dev/ublkc0 /dev/ublkb0 2>/dev/null; usleep 20000; done ) & udev=$!
su -s /tmp/bin/sh user -c 'exec /bin/blkmq serve --disk name=vm3,file=/tmp/vm3.raw --ublk 0 --control unix:/tmp/user.sock' \
  > /tmp/user.out 2>> /tmp/log & server=$!
for turn in $(seq 200); do grep -qs ready /tmp/user.out && break; usleep 50000; done
grep -q ready /tmp/user.out || fail 'a user cannot serve'
grep -q 'Uid:.1000' /proc/$server/status || fail 'not a user'
fio --name=user --filename=/dev/ublkb0 --rw=randwrite --bs=4k --iodepth=8 --size=4M $verify > /tmp/fio || fail 'fio verify on a device of a user'
stop; kill $udev
test -e /dev/ublkb0 && fail 'stopped by a user, and there'
say 'served by a user'
dmesg | grep -v MP-BIOS | grep -i 'warn\|bug:' && fail 'the kernel warns'
busybox echo SUCCESS
