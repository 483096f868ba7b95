//! The send queue of a connection.
//!
//! An entry is a header, a range of a command's buffer, and digests. It leaves the queue when all
//! its bytes are sent.

use std::collections::VecDeque;
use std::io::IoSlice;

use forebay_nvme::tcp::{DIGEST_BYTES, MAX_HEADER_BYTES};

pub(crate) struct TxItem {
    pub(crate) header: [u8; MAX_HEADER_BYTES],
    pub(crate) header_bytes: u8,
    pub(crate) slot: u16,
    /// Range of the slot's buffer.
    pub(crate) offset_bytes: u32,
    pub(crate) length_bytes: u32,
    pub(crate) digest: [u8; DIGEST_BYTES],
    pub(crate) digest_bytes: u8,
    /// The last PDU for its R2T.
    pub(crate) answers_r2t: bool,
}

impl TxItem {
    fn total_bytes(&self) -> usize {
        usize::from(self.header_bytes) + self.length_bytes as usize + usize::from(self.digest_bytes)
    }
}

pub(crate) struct TxQueue {
    items: VecDeque<TxItem>,
    /// Sent bytes of the first item.
    sent_bytes: usize,
}

impl TxQueue {
    pub(crate) fn new() -> Self {
        Self {
            items: VecDeque::with_capacity(64),
            sent_bytes: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    pub(crate) fn is_between_pdus(&self) -> bool {
        self.sent_bytes == 0
    }

    pub(crate) fn push(&mut self, item: TxItem) {
        self.items.push_back(item);
    }

    pub(crate) fn clear(&mut self) {
        self.items.clear();
    }

    /// Returns the number of slices filled, and their bytes. `buffer` returns a slot's buffer.
    pub(crate) fn gather<'a>(
        &'a self,
        slices: &mut [IoSlice<'a>],
        buffer: impl Fn(u16) -> &'a [u8],
    ) -> (usize, usize) {
        let mut count = 0;
        let mut bytes = 0;
        let mut skip = self.sent_bytes;
        for item in &self.items {
            if count + 3 > slices.len() {
                break;
            }
            let from = item.offset_bytes as usize;
            for part in [
                &item.header[..usize::from(item.header_bytes)],
                &buffer(item.slot)[from..from + item.length_bytes as usize],
                &item.digest[..usize::from(item.digest_bytes)],
            ] {
                let left = &part[skip.min(part.len())..];
                skip -= part.len() - left.len();
                if !left.is_empty() {
                    slices[count] = IoSlice::new(left);
                    count += 1;
                    bytes += left.len();
                }
            }
        }
        (count, bytes)
    }

    pub(crate) fn sent(&mut self, bytes: usize) {
        self.sent_bytes += bytes;
    }

    /// The next completely sent PDU: its slot, and whether it answers an R2T.
    pub(crate) fn pop_sent(&mut self) -> Option<(u16, bool)> {
        let total = self.items.front()?.total_bytes();
        self.sent_bytes = self.sent_bytes.checked_sub(total)?;
        let item = self.items.pop_front()?;
        Some((item.slot, item.answers_r2t))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_split_of_the_stream_is_the_stream() {
        let buffer: Vec<u8> = (100..200).collect();
        let item = |slot: u16, n: u32| TxItem {
            header: [slot as u8; MAX_HEADER_BYTES],
            header_bytes: 5,
            slot,
            offset_bytes: 3,
            length_bytes: n,
            digest: [9; 4],
            digest_bytes: if n > 0 { 4 } else { 0 },
            answers_r2t: slot == 1,
        };
        let mut expected = Vec::new();
        for (slot, n) in [(0, 7), (1, 0), (2, 20)] {
            expected.extend([slot as u8; 5]);
            expected.extend(&buffer[3..3 + n]);
            expected.extend(if n > 0 { &[9u8; 4][..] } else { &[] });
        }
        for step in 1..=expected.len() {
            let mut queue = TxQueue::new();
            for (slot, n) in [(0, 7), (1, 0), (2, 20)] {
                queue.push(item(slot, n));
            }
            let (mut stream, mut popped) = (Vec::<u8>::new(), Vec::new());
            while !queue.is_empty() {
                let mut slices = [IoSlice::new(&[]); 12];
                let (count, bytes) = queue.gather(&mut slices, |_| &buffer);
                let all: Vec<u8> = slices[..count].iter().flat_map(|s| s.to_vec()).collect();
                assert_eq!(all.len(), bytes);
                let now = bytes.min(step);
                stream.extend(&all[..now]);
                queue.sent(now);
                while let Some(pdu) = queue.pop_sent() {
                    popped.push(pdu);
                }
            }
            assert_eq!(stream, expected);
            assert_eq!(popped, [(0, false), (1, true), (2, false)]);
            assert!(queue.is_between_pdus());
        }
    }
}
