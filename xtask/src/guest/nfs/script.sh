# Who may write to an image on NFS: the kernel's server and two hosts, each with a network of its own, in one guest.
export PATH=/bin:/tmp/bin
busybox mkdir /tmp/bin; busybox --install -s /tmp/bin
mkdir -p /tmp/run /tmp/export /mnt/one /mnt/two
fail() { echo "wrong: $1"; for log in /tmp/*.log; do echo "$log:"; tail -5 $log; done; cat /proc/locks; dmesg | tail -20; poweroff -nf; sleep 60; }

# The server, without its programs: the kernel is told what is exported, and to whom, as they do.
ip link set lo up
ip link add to-two type veth && unshare -n -u sleep 1000 & sleep 1; host=$!
ip link set veth0 netns $host && ip addr add 10.0.0.1/24 dev to-two && ip link set to-two up || fail 'the network'
mount -t tmpfs tmpfs /tmp/export
mount -t nfsd nfsd /proc/fs/nfsd
cd /proc/fs/nfsd; echo '-3' > versions; echo 10 > nfsv4leasetime; echo 10 > nfsv4gracetime
for address in 127.0.0.1 10.0.0.2; do echo "nfsd $address 2147483647 all" > /proc/net/rpc/auth.unix.ip/channel; done
# NFSEXP_FSID, NFSEXP_NOSUBTREECHECK and NFSEXP_INSECURE_PORT.
echo 'all /tmp/export 2147483647 9218 65534 65534 0' > /proc/net/rpc/nfsd.export/channel
echo 'all 1 \x00000000 2147483647 /tmp/export' > /proc/net/rpc/nfsd.fh/channel
echo 'tcp 2049' > portlist && echo 4 > threads || fail 'the server'
echo Y > v4_end_grace; cd /

mount -t nfs4 -o vers=4.2,addr=127.0.0.1,clientaddr=127.0.0.1 127.0.0.1:/ /mnt/one || fail 'the mount of one'
nsenter -t $host -n -u sh -c "hostname two && ip link set lo up && ip addr add 10.0.0.2/24 dev veth0 && ip link set veth0 up &&
  mount -t nfs4 -o vers=4.2,addr=10.0.0.1,clientaddr=10.0.0.2 10.0.0.1:/ /mnt/two" || fail 'the mount of two'
truncate -s 16M /mnt/one/vm1.raw
dd if=/dev/urandom of=/tmp/noise bs=1M count=16 2>/dev/null

# serve NAME HOST KEYS WORDS: starts a daemon; whether it serves.
serve() {
  name=$1; disk=name=vm1,file=/mnt/$2/vm1.raw$3; shift 3
  rm -f /tmp/out; blkmq serve --control none --disk $disk --nbd unix:/tmp/$name.sock "$@" > /tmp/out 2> /tmp/$name.log & server=$!
  for turn in $(seq 600); do grep -qs ready /tmp/out && return; kill -0 $server 2>/dev/null || return 1; usleep 50000; done
  fail "$name neither serves nor ends"
}
# refused HOST KEYS WORDS: a daemon there is refused, and says these words.
refused() {
  serve refused $1 "$2" && fail "$1 is not refused"
  grep -q "$3" /tmp/refused.log || fail "not said: $3"
}

serve one one '' --upgrade-socket unix:/tmp/upgrade.sock || fail 'one does not serve'
first=$server
nbdcopy --flush /tmp/noise 'nbd+unix:///vm1?socket=/tmp/one.sock' || fail 'a copy'
refused one '' 'in use by blkmq'
refused two '' 'another host'
refused two ',ro=on' 'another host'
echo 'a second writer is refused on both hosts'

serve heir one '' --upgrade-socket unix:/tmp/upgrade.sock --take-over unix:/tmp/upgrade.sock || fail 'the take-over'
heir=$server; wait $first || fail 'the first daemon'
refused one '' 'in use by'
refused two '' 'another host'
echo 'and beside a daemon that has taken over'

kill -9 $heir
serve two two '' || fail 'two does not serve after a kill of one'
two=$server
nbdcopy 'nbd+unix:///vm1?socket=/tmp/two.sock' /tmp/found && cmp /tmp/noise /tmp/found || fail 'what one has written'
refused one '' 'another host'
kill $two; wait $two || fail 'the end of two'
echo 'the lock of a daemon that was killed is free'

serve reader1 one ,ro=on || fail 'a reader on one'
reader1=$server
serve reader2 two ,ro=on || fail 'a reader on two'
reader2=$server
refused one '' 'in use by'
kill $reader1 $reader2; wait $reader1; wait $reader2
serve last one '' || fail 'one does not serve at the end'
echo 'readers share the image'
busybox echo SUCCESS
