//! Power cuts: two devices lose unsynced writes, over several lives.

use super::*;

#[derive(Default)]
struct Journal {
    synced: Vec<u8>,
    writes: Vec<(u64, Vec<u8>)>,
    /// Writes and syncs that still work.
    left: Option<u64>,
}

struct Crashing(Arc<Mutex<[Journal; 2]>>, usize);

const CRASH_BYTES: u64 = 200 * 4096;

impl Crashing {
    fn with<T>(&self, work: impl FnOnce(&mut Journal) -> T) -> T {
        work(&mut self.0.lock().unwrap()[self.1])
    }

    /// Both devices fail from the same operation on.
    fn works(&self) -> io::Result<()> {
        let journals = &mut self.0.lock().unwrap();
        match &mut journals[0].left {
            Some(0) => Err(io::Error::other("cut")),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// `keep` decides for each unsynced sector.
    fn cut(&self, mut keep: impl FnMut() -> bool) {
        self.with(|journal| {
            for (offset, data) in std::mem::take(&mut journal.writes) {
                for (sector, piece) in data.chunks(512).enumerate() {
                    if keep() {
                        let to = offset as usize + sector * 512;
                        journal.synced[to..to + 512].copy_from_slice(piece);
                    }
                }
            }
            journal.left = None;
        });
    }
}

impl BlockStore for Crashing {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.with(|journal| {
            let from = offset as usize;
            let end = from + buf.len();
            buf.copy_from_slice(&journal.synced[from..end]);
            for (at, data) in &journal.writes {
                let (start, stop) = (*at as usize, *at as usize + data.len());
                let (low, high) = (start.max(from), stop.min(end));
                if low < high {
                    buf[low - from..high - from].copy_from_slice(&data[low - start..high - start]);
                }
            }
        });
        Ok(())
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.works()?;
        self.with(|journal| journal.writes.push((offset, data.to_vec())));
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        self.works()?;
        self.with(|journal| {
            for (at, data) in std::mem::take(&mut journal.writes) {
                journal.synced[at as usize..at as usize + data.len()].copy_from_slice(&data);
            }
        });
        Ok(())
    }
    fn capacity(&self) -> io::Result<u64> {
        Ok(CRASH_BYTES)
    }
}

/// Block 0: a version, and the blocks that carry it.
fn head(mirror: &Mirror) -> (u8, u64, u64) {
    let mut bytes = [0; 17];
    mirror.read(0, &mut bytes).unwrap();
    let number = |from: usize| u64::from_le_bytes(bytes[from..from + 8].try_into().unwrap());
    (bytes[0], number(1), number(9))
}

/// A life: blocks of each round, operations until the cut, a seed, and the devices at the next
/// opening.
fn life() -> impl Strategy<Value = (Vec<u64>, u64, u64, u8)> {
    let rounds = prop::collection::vec(1u64..12, 1..5);
    (rounds, 0u64..120, any::<u64>(), 0u8..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases(300)))]

    /// Like redb, writes new blocks, then block 0 names them. After a cut, block 0 is the last
    /// acknowledged one or the one being synced, with readable blocks. Some lives have one device
    /// only, the same until both are back.
    #[test]
    fn crashes_leave_an_acknowledged_state(lives in prop::collection::vec(life(), 1..7)) {
        let journal = || Journal { synced: vec![0; CRASH_BYTES as usize], ..Journal::default() };
        let shared = Arc::new(Mutex::new([journal(), journal()]));
        let areas = |which: &[usize]| -> Vec<Area> {
            which
                .iter()
                .map(|at| {
                    let store = Arc::new(Crashing(shared.clone(), *at));
                    Area::new(store, DeviceIndex(*at as u8), 0, CRASH_BYTES, OWNER).unwrap()
                })
                .collect()
        };
        let open = |which: &[usize]| Mirror::open(areas(which).into_iter().map(FoundArea::new).collect(), &[]);
        let mirror = Mirror::format(areas(&[0, 1])).unwrap();
        mirror.set_len(mirror.capacity()).unwrap();
        mirror.sync().unwrap();
        drop(mirror);
        let (mut version, mut last) = (0u8, 0u8);
        let mut here = vec![0, 1];
        for (rounds, left, seed, which) in lives {
            // After both: any. After one: the same one, or both.
            here = match (here.as_slice(), which) {
                ([0, 1], 0) => vec![0],
                ([0, 1], 1) => vec![1],
                (one, 0..3) => one.to_vec(),
                _ => vec![0, 1],
            };
            shared.lock().unwrap()[0].left = Some(left);
            let Ok(mirror) = open(&here) else {
                prop_assert!(false, "it does not open");
                return Ok(());
            };
            let (found, first, count) = head(&mirror);
            prop_assert!(found == last, "{} instead of {}", found, last);
            let mut next = (first + count).max(1);
            // Like redb, a life begins with the header.
            let mut same = [0; 17];
            mirror.read(0, &mut same).unwrap();
            let mut goes_on = mirror.write(0, &same).and_then(|()| mirror.sync()).is_ok();
            let mut candidate = found;
            for count in &rounds {
                if !goes_on { break; }
                version += 1;
                let first = next;
                goes_on = (0..*count).all(|at| {
                    // Wraps around, far from the blocks that block 0 names.
                    mirror.write((first + at - 1) % 180 * 4096 + 4096, &[version; 4096]).is_ok()
                });
                next += count;
                if !goes_on || mirror.sync().is_err() { break; }
                let named: Vec<u8> =
                    [&[version], &first.to_le_bytes()[..], &count.to_le_bytes()[..]].concat();
                candidate = version;
                goes_on = mirror.write(0, &named).is_ok() && mirror.sync().is_ok();
                if goes_on { last = version; }
            }
            drop(mirror);
            let mut choices = fastrand::Rng::with_seed(seed);
            for at in 0..2 {
                Crashing(shared.clone(), at)
                    .cut(|| match seed % 4 { 0 => false, 1 => true, _ => choices.bool() });
            }
            let mirror = open(&here);
            prop_assert!(mirror.is_ok(), "{:?}", mirror.err());
            let mirror = mirror.unwrap();
            let (found, first, count) = head(&mirror);
            prop_assert!(found == last || found == candidate, "{} after {}, {}", found, last, candidate);
            last = found;
            for at in 0..count {
                let mut content = [0; 4096];
                mirror.read((first + at - 1) % 180 * 4096 + 4096, &mut content).unwrap();
                prop_assert_eq!(content[0], found);
            }
        }
    }
}
