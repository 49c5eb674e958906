# What the kernel's NBD client of Debian 12 does with a disk, in a guest.
export PATH=/bin:/tmp/bin HOME=/tmp
busybox mkdir /tmp/bin; busybox --install -s /tmp/bin
mkdir -p /tmp/run
fail() { echo "wrong: $1"; tail -20 /tmp/log; tail -5 /tmp/client; dmesg | tail -20; poweroff -nf; sleep 60; }
ip link set lo up
truncate -s 64M /tmp/vm1.raw
# serve WORDS: starts a daemon, and waits until it serves.
serve() {
  rm -f /tmp/out; blkmq serve --control none --disk name=vm1,file=/tmp/vm1.raw "$@" > /tmp/out 2>> /tmp/log & server=$!
  for turn in $(seq 600); do grep -qs ready /tmp/out && return; usleep 50000; done
  fail "the daemon is not ready: serve $*"
}
tls="--nbd tcp:127.0.0.1:10809 --tls require --tls-certificate /pki/server-cert.pem --tls-key /pki/server-key.pem --tls-ca /pki/ca-cert.pem"
secured="-certfile /pki/client-cert.pem -keyfile /pki/client-key.pem -cacertfile /pki/ca-cert.pem -tlshostname localhost"
nbd-client --version 2>&1 | head -1

# With TLS 1.3 alone the client is refused, and the log says what it has.
serve $tls
timeout 20 nbd-client 127.0.0.1 10809 /dev/nbd0 -N vm1 $secured > /tmp/client 2>&1 && fail 'a client of TLS 1.2 is admitted'
grep -q 'offers TLS 1.2 at most' /tmp/log || fail 'nothing is said of its version'
kill $server; wait $server

# Where TLS 1.2 is allowed, a file system is made and read again.
serve $tls --allow-tls12
nbd-client 127.0.0.1 10809 /dev/nbd0 -N vm1 $secured > /tmp/client 2>&1 || fail 'nbd-client with TLS 1.2'
mkfs.ext4 -q /dev/nbd0 && mount -t ext4 /dev/nbd0 /mnt || fail 'mount by TLS 1.2'
dd if=/dev/urandom of=/tmp/noise bs=1M count=16 2>/dev/null
cp /tmp/noise /mnt/noise && sync && echo 3 > /proc/sys/vm/drop_caches && cmp /tmp/noise /mnt/noise || fail 'a file by TLS 1.2'
umount /mnt && e2fsck -fn /dev/nbd0 > /tmp/fsck 2>&1 || { cat /tmp/fsck; fail e2fsck; }
nbd-client -d /dev/nbd0 > /tmp/client 2>&1 || fail 'nbd-client -d'
kill $server; wait $server
echo 'a file system by TLS 1.2'

# A take-over: its user sees no error.
upgrade=unix:/tmp/upgrade.sock
serve --nbd unix:/tmp/nbd.sock --upgrade-socket $upgrade
nbd-client -unix /tmp/nbd.sock /dev/nbd0 -N vm1 -persist > /tmp/client 2>&1 || fail 'nbd-client'
touch /tmp/loaded
( while test -e /tmp/loaded; do dd if=/tmp/noise of=/dev/nbd0 bs=64k count=64 oflag=direct 2>/tmp/err || { cat /tmp/err; exit 1; }; done ) & load=$!
for turn in 1 2 3; do
  sleep 1; before=$server
  serve --nbd unix:/tmp/nbd.sock --upgrade-socket $upgrade --take-over $upgrade
  wait $before || fail "the first daemon has ended with $?"
done
sleep 1; kill -0 $load || fail 'an error by a take-over'
echo 'replaced three times without an error'

rm /tmp/loaded; wait $load || fail 'an error at the end'
dmesg | grep -i 'bug:' && fail 'the kernel warns'
busybox echo SUCCESS
