// SPDX-License-Identifier: Apache-2.0
//
// Preloaded into a program, it gives it one MCTP socket without a kernel's MCTP: messages go as
// packets (DSP0236) in frames (DSP0253) over the Unix socket that MCTP_LINE names. The library calls
// the kernel itself, so it needs no symbol of a certain C library.

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>
#include <linux/mctp.h>

enum { FLAG = 0x7E, ESCAPE = 0x7D, OWN_EID = 8, UNIT = 64, MESSAGE_MAX = 1 << 16 };
enum { VERSION = 1, START = 0x80, END = 0x40, OWNER = 0x08, TAG = 0x07 };

static int line = -1;
static uint8_t tag, message[1 + MESSAGE_MAX];

int socket(int domain, int type, int protocol)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    const char *path = getenv("MCTP_LINE");

    if (domain != AF_MCTP)
        return syscall(SYS_socket, domain, type, protocol);
    if (!path || strlen(path) >= sizeof(address.sun_path)) {
        errno = EAFNOSUPPORT;
        return -1;
    }
    strcpy(address.sun_path, path);
    line = syscall(SYS_socket, AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (line >= 0 && connect(line, (struct sockaddr *)&address, sizeof(address)))
        return -1;
    return line;
}

static uint16_t check(uint16_t sum, const uint8_t *bytes, size_t count)
{
    while (count--) {
        sum ^= *bytes++;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0x8408 : 0);
    }
    return sum;
}

static int send_packet(const uint8_t *packet, uint8_t count)
{
    uint8_t frame[6 + 2 * (4 + UNIT)] = { FLAG, 1, count };
    uint16_t sum = check(check(0xFFFF, frame + 1, 2), packet, count);
    size_t length = 3;

    for (uint8_t i = 0; i < count; i++) {
        int is_special = packet[i] == FLAG || packet[i] == ESCAPE;
        if (is_special)
            frame[length++] = ESCAPE;
        frame[length++] = is_special ? packet[i] ^ 0x20 : packet[i];
    }
    frame[length++] = sum >> 8;
    frame[length++] = sum;
    frame[length++] = FLAG;
    return write(line, frame, length) == (ssize_t)length ? 0 : -1;
}

ssize_t sendmsg(int fd, const struct msghdr *msg, int flags)
{
    const struct sockaddr_mctp *to = msg->msg_name;
    size_t length = 1, sent = 0;

    if (fd != line)
        return syscall(SYS_sendmsg, fd, msg, flags);
    message[0] = to->smctp_type;
    for (size_t i = 0; i < msg->msg_iovlen; length += msg->msg_iov[i++].iov_len) {
        if (msg->msg_iov[i].iov_len > sizeof(message) - length) {
            errno = EMSGSIZE;
            return -1;
        }
        memcpy(message + length, msg->msg_iov[i].iov_base, msg->msg_iov[i].iov_len);
    }
    tag = (tag + 1) & TAG;
    for (uint8_t number = 0; sent < length; number = (number + 1) & 3) {
        size_t part = length - sent < UNIT ? length - sent : UNIT;
        uint8_t packet[4 + UNIT] = { VERSION, to->smctp_addr.s_addr, OWN_EID };
        packet[3] = (sent ? 0 : START) | (sent + part == length ? END : 0) | number << 4 | OWNER | tag;
        memcpy(packet + 4, message + sent, part);
        if (send_packet(packet, 4 + part))
            return -1;
        sent += part;
    }
    return length - 1;
}

// The next byte, or -1. Nothing is read ahead, so poll() still tells of the next message.
static int next(void)
{
    uint8_t byte;

    return read(line, &byte, 1) == 1 ? byte : -1;
}

// The length of the next packet, or -1.
static int receive_packet(uint8_t *packet)
{
    uint8_t head[2];
    int byte, count;

    while ((byte = next()) != FLAG)
        if (byte < 0)
            return -1;
    while ((byte = next()) == FLAG)
        ;
    head[0] = byte;
    head[1] = count = next();
    for (int i = 0; i < count; i++) {
        byte = next();
        packet[i] = byte == ESCAPE ? next() ^ 0x20 : byte;
    }
    byte = next() << 8;
    byte |= next();
    if (next() != FLAG || head[0] != 1 || count < 4 ||
        byte != check(check(0xFFFF, head, 2), packet, count))
        return -1;
    return count;
}

ssize_t recvmsg(int fd, struct msghdr *msg, int flags)
{
    struct sockaddr_mctp *from = msg->msg_name;
    uint8_t packet[255] = { 0 };
    size_t length = 0, copied = 1;

    if (fd != line)
        return syscall(SYS_recvmsg, fd, msg, flags);
    for (uint8_t number = 0; !(packet[3] & END); number = (number + 1) & 3) {
        int count = receive_packet(packet);
        int begins = length == 0 ? START : 0;
        // A response to the last request, with its fragments in order.
        if (count < 4 || packet[1] != OWN_EID || (packet[3] & ~END & ~0x30) != (begins | tag) ||
            (!begins && (packet[3] >> 4 & 3) != number) ||
            length + count - 4 > sizeof(message)) {
            errno = EPROTO;
            return -1;
        }
        if (begins)
            number = packet[3] >> 4 & 3;
        memcpy(message + length, packet + 4, count - 4);
        length += count - 4;
    }
    for (size_t i = 0; i < msg->msg_iovlen && copied < length; i++) {
        size_t part = msg->msg_iov[i].iov_len;
        if (part > length - copied)
            part = length - copied;
        memcpy(msg->msg_iov[i].iov_base, message + copied, part);
        copied += part;
    }
    msg->msg_flags = copied < length ? MSG_TRUNC : 0;
    if (from) {
        *from = (struct sockaddr_mctp){ .smctp_family = AF_MCTP, .smctp_type = message[0] };
        from->smctp_addr.s_addr = packet[2];
        from->smctp_tag = tag;
    }
    return copied - 1;
}
