#!/bin/sh
# The guest's first and only own process: sets up what a small Linux needs, then takes commands.
#
# Commands come from the virtio-serial port named forebay.control, a line each:
#   run ID BASE64     run this shell command beside others; answer when it has ended
#   off 0 -           sync and power off
# Answers: "ready" once, and for each command "end ID CODE LENGTH" and LENGTH bytes of output.
# When the port is closed, whoever booted us is gone: power off.

# Links for all that is not there already.
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
export HOME=/root
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir /run/jobs
cd /root

ip link set lo up
modprobe virtio_net
tries=0
while [ ! -e /sys/class/net/eth0 ] && [ "$tries" -lt 100 ]; do
    tries=$((tries + 1))
    sleep 0.1
done
ip link set eth0 up
ip address add 10.0.2.15/24 dev eth0
ip route add default via 10.0.2.2

port=
for entry in /sys/class/virtio-ports/*; do
    if [ "$(cat "$entry/name")" = forebay.control ]; then
        port=/dev/$(basename "$entry")
    fi
done

run() {
    sh "/run/jobs/$1" >"/run/jobs/$1.out" 2>&1 </dev/null 3>&-
    code=$?
    {
        flock 9
        echo "end $1 $code $(wc -c <"/run/jobs/$1.out")" >&3
        cat "/run/jobs/$1.out" >&3
    } 9>/run/lock
    rm -f "/run/jobs/$1" "/run/jobs/$1.out"
}

exec 3<>"$port"
echo ready >&3
while read -r word id text <&3; do
    case $word in
        run)
            echo "$text" | base64 -d >"/run/jobs/$id"
            run "$id" &
            ;;
        off)
            break
            ;;
    esac
done
sync
poweroff -f
