//! Random input: no panics, no leaks, and other hosts are served.

use super::rig::{Host, Rig, rig, rw, write_in_capsule};
use super::*;
use crate::frontend::Frontend;
use proptest::prelude::*;
use zerocopy::IntoBytes;

/// A PDU with valid or invalid parts.
#[derive(Clone, Debug)]
enum Piece {
    Command {
        sqe: Vec<u8>,
        opcode: u8,
        cid: u16,
        lba: u64,
        blocks: u32,
        sgl: u8,
        data: usize,
    },
    Data {
        cid: u16,
        ttag: u16,
        offset: u32,
        length: u32,
        last: bool,
    },
    Noise(Vec<u8>),
    Turn,
    Hear,
}

fn piece() -> impl Strategy<Value = Piece> {
    let command = (
        proptest::collection::vec(any::<u8>(), 64),
        prop_oneof![
            2 => proptest::sample::select(vec![0u8, 1, 2, 5, 8, 9, 0x0d, 0x0e, 0x11, 0x15]),
            2 => proptest::sample::select(vec![1u8, 5]),
            1 => any::<u8>(),
        ],
        0u16..6,
        prop_oneof![0u64..64, any::<u64>()],
        1u32..20,
        0u8..6,
        0usize..9000,
    )
        .prop_map(
            |(sqe, opcode, cid, lba, blocks, sgl, data)| Piece::Command {
                sqe,
                opcode,
                cid,
                lba,
                blocks,
                sgl,
                data,
            },
        );
    let data = (0u16..6, 0u16..0x306, 0u32..3, 1u32..5, any::<bool>()).prop_map(
        |(cid, ttag, offset, length, last)| Piece::Data {
            cid,
            ttag,
            offset: offset * 4096,
            length: length * 4096,
            last,
        },
    );
    prop_oneof![
        8 => command,
        6 => data,
        1 => proptest::collection::vec(any::<u8>(), 0..40).prop_map(Piece::Noise),
        4 => Just(Piece::Turn),
        2 => Just(Piece::Hear),
    ]
}

fn bytes_of(piece: &Piece, host: &Host) -> Vec<u8> {
    let mut out = vec![0; tcp::MAX_HEADER_BYTES];
    match piece {
        Piece::Command {
            sqe,
            opcode,
            cid,
            lba,
            blocks,
            sgl,
            data,
        } => {
            let mut raw = match sgl {
                0 => rw(*opcode, *cid, *lba, *blocks),
                1 => write_in_capsule(*cid, *lba, *blocks),
                2 => Sqe {
                    opcode: *opcode,
                    ..write_in_capsule(*cid, *lba, 1)
                },
                3 => rw(1, *cid, *lba % 64, *blocks),
                _ => Sqe::default(),
            };
            // Halves of fused pairs, which may match.
            if matches!(*opcode, 1 | 5) && *lba % 2 == 0 {
                raw.opcode = *opcode;
                raw.flags |= if *lba % 8 == 0 {
                    (*lba >> 3) as u8 & 3
                } else {
                    2 - (*opcode >> 2)
                };
            }
            if *sgl > 3 {
                raw.as_mut_bytes().copy_from_slice(sqe);
                raw.cid = (*cid).into();
            }
            // Often the length that the command says.
            let data = match sgl {
                0 | 3 => 0,
                1 => (*blocks as usize * 4096).min(8192),
                2 => 4096,
                _ => *data % 8193,
            };
            let n = tcp::put_capsule_cmd(&mut out, &host.params, &raw, data as u32);
            out.truncate(n);
            out.resize(n + data, *cid as u8);
        }
        Piece::Data {
            cid,
            ttag,
            offset,
            length,
            last,
        } => {
            let header = tcp::H2cData {
                cid: *cid,
                ttag: *ttag,
                offset_bytes: *offset,
                length_bytes: *length,
                last: *last,
            };
            let n = tcp::put_h2c_data(&mut out, &host.params, &header);
            out.truncate(n);
            out.resize(n + *length as usize, 0x5a);
        }
        Piece::Noise(noise) => out = noise.clone(),
        Piece::Turn | Piece::Hear => out.clear(),
    }
    out
}

fn serves(rig: &mut Rig, good: &mut Host, round: u16) {
    good.say(&write_in_capsule(round, 100, 1), &[round as u8; 4096]);
    rig.turns(2);
    assert_eq!(
        good.response().map(|c| (c.cid(), c.status())),
        Some((round, Status::SUCCESS))
    );
    good.say(&rw(2, round, 100, 1), &[]);
    rig.turns(2);
    let (pdu, data) = good.hear().unwrap();
    assert!(matches!(pdu, Pdu::C2hData(c) if c.cid == round) && data == [round as u8; 4096]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]
    #[test]
    fn whatever_a_host_sends(streams in proptest::collection::vec(
        (any::<bool>(), proptest::collection::vec((piece(), 1usize..10_000), 1..40)), 1..4,
    )) {
        let mut rig = rig();
        rig.map_all();
        let (admin, cntlid) = rig.admin();
        let mut good = rig.io(cntlid, 9, 32);
        for (round, (on_admin, pieces)) in streams.into_iter().enumerate() {
            let (mut bad, own) = if on_admin {
                (rig.admin().0, None)
            } else {
                let (own, own_id) = rig.admin();
                (rig.io(own_id, 1, 8), Some(own))
            };
            for (piece, cut) in pieces {
                match piece {
                    Piece::Turn => rig.turns(2),
                    Piece::Hear => while bad.hear().is_some() {},
                    piece => {
                        let bytes = bytes_of(&piece, &bad);
                        let (first, second) = bytes.split_at(cut.min(bytes.len()));
                        for part in [first, second] {
                            let _ = rustix::net::send(&bad.fd, part, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
                            if cut % 3 == 0 {
                                rig.turns(1);
                            }
                        }
                    }
                }
            }
            rig.turns(3);
            serves(&mut rig, &mut good, round as u16);
            drop((bad, own));
            rig.turns(4);
            prop_assert_eq!(rig.frontend.count(), 2);
            prop_assert_eq!((rig.core.staging.out(), rig.frontend.shared.r2ts.get()), (0, 0));
        }
        drop((admin, good));
        rig.turns(4);
        prop_assert_eq!(rig.frontend.count(), 0);
        let used = rig.core.region.queues().iter().filter(|q| q.used.load(Relaxed) != 0).count();
        prop_assert_eq!(used, 0);
    }
}
