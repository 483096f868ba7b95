# The first process of a User Mode Linux: runs one job that lies in a folder of the machine, /host, and powers off.
#
# There: `job` is the script; `out` gets what it prints, `code` its exit code.

/bin/busybox --install -s /bin 2>/dev/null
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev 2>/dev/null
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t hostfs none /usr/lib/modules -o /usr/lib/uml/modules
modprobe virtio_blk
sh /host/job >/host/out 2>&1
echo $? >/host/code
sync
poweroff -f
