//! Transfers against a memory disk that completes commands out of order.

use std::fs::File;
use std::io::Seek;
use std::os::unix::fs::FileExt;

use super::*;
use proptest::prelude::*;

struct MemoryDisk {
    bytes: Vec<u8>,
    block_bytes: usize,
    depth: usize,
    flying: Vec<(IoOp, u64, Vec<u8>)>,
    written_bytes: usize,
    zeroed_bytes: usize,
    flushed: bool,
    /// Writes and zeroings since the last flush.
    unflushed: usize,
    fail_at: Option<u64>,
    random: fastrand::Rng,
}

impl MemoryDisk {
    fn new(bytes: Vec<u8>, block_bytes: usize, depth: usize) -> Self {
        Self {
            bytes,
            block_bytes,
            depth,
            flying: Vec::new(),
            written_bytes: 0,
            zeroed_bytes: 0,
            flushed: false,
            unflushed: 0,
            fail_at: None,
            random: fastrand::Rng::with_seed(1),
        }
    }

    fn shape(&self, max_transfer_bytes: Option<u64>) -> VolumeShape {
        VolumeShape {
            size_bytes: self.bytes.len() as u64,
            block_bytes: self.block_bytes as u32,
            max_transfer_bytes,
        }
    }

    fn execute(&mut self, op: &IoOp, buf: &mut [u8]) {
        let range = |lba: u64, blocks: u32| {
            let start = lba as usize * self.block_bytes;
            start..start + blocks as usize * self.block_bytes
        };
        match *op {
            IoOp::Read { lba, blocks } => {
                let range = range(lba, blocks);
                buf[..range.len()].copy_from_slice(&self.bytes[range]);
            }
            IoOp::Write { lba, blocks, .. } => {
                let range = range(lba, blocks);
                self.written_bytes += range.len();
                self.unflushed += 1;
                self.bytes[range.clone()].copy_from_slice(&buf[..range.len()]);
            }
            IoOp::WriteZeroes { lba, blocks, .. } => {
                let range = range(lba, blocks);
                self.zeroed_bytes += range.len();
                self.unflushed += 1;
                self.bytes[range].fill(0);
            }
            IoOp::Flush => {
                self.flushed = true;
                self.unflushed = 0;
            }
            IoOp::Deallocate { .. } => panic!("not used"),
        }
    }
}

impl Commands for MemoryDisk {
    fn submit(&mut self, op: &IoOp, tag: u64, buf: Vec<u8>) -> Result<(), NotSubmitted> {
        assert!(
            self.flying.len() < self.depth,
            "more in flight than the depth"
        );
        self.flying.push((*op, tag, buf));
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<Done>, _limit: Duration) -> Result<usize, Error> {
        let index = self.random.usize(..self.flying.len());
        let (op, tag, mut buf) = self.flying.swap_remove(index);
        let failed = self
            .fail_at
            .is_some_and(|at| op != IoOp::Flush && tag >= at);
        let status = if failed {
            Status::CAPACITY_EXCEEDED
        } else {
            Status::SUCCESS
        };
        if !failed {
            self.execute(&op, &mut buf);
        }
        out.push(Done {
            tag,
            status,
            result: 0,
            buf,
        });
        Ok(1)
    }

    fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn depth(&self) -> usize {
        self.depth
    }
}

fn source_of(bytes: &[u8], sparse: bool) -> Source {
    Source::file(file_of(bytes, sparse), bytes.len() as u64)
}

fn stream_of(bytes: &[u8]) -> Source {
    let mut source = Source::stream(file_of(bytes, true)).unwrap();
    source.read_head().unwrap();
    source
}

fn whole(mut file: File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().unwrap();
    std::io::Read::read_to_end(&mut file, &mut bytes).unwrap();
    bytes
}

fn file_of(bytes: &[u8], sparse: bool) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    if sparse {
        for run in runs(bytes, 4096).filter(|run| !run.zero) {
            file.write_all_at(&bytes[run.start..run.start + run.bytes], run.start as u64)
                .unwrap();
        }
    } else {
        file.write_all_at(bytes, 0).unwrap();
    }
    file
}

fn pattern(parts: &[(usize, u8)]) -> Vec<u8> {
    parts
        .iter()
        .flat_map(|&(bytes, value)| std::iter::repeat_n(value, bytes))
        .collect()
}

const MIB: usize = 1 << 20;

#[test]
fn zeros_are_not_written_to_a_fresh_volume() {
    let image = pattern(&[(MIB, 0), (4096, 7), (3 * MIB - 4096, 0), (MIB, 9)]);
    let sources = [
        source_of(&image, false),
        source_of(&image, true),
        stream_of(&image),
    ];
    for mut source in sources {
        let mut disk = MemoryDisk::new(vec![0; 8 * MIB], 4096, 4);
        let shape = disk.shape(None);
        import(&mut disk, shape, &mut source, true, &mut |_| Ok(())).unwrap();
        assert_eq!(disk.bytes[..image.len()], image);
        assert_eq!(
            (disk.written_bytes, disk.zeroed_bytes),
            (64 * 1024 + MIB, 0)
        );
        assert!(disk.flushed && disk.unflushed == 0);
    }
}

#[test]
fn zeros_replace_old_data() {
    let image = pattern(&[(2 * MIB, 0), (4096, 7), (MIB - 4096, 0)]);
    for mut source in [source_of(&image, true), stream_of(&image)] {
        let mut disk = MemoryDisk::new(vec![0xaa; 4 * MIB], 512, 3);
        let shape = disk.shape(Some(128 * 1024));
        import(&mut disk, shape, &mut source, false, &mut |_| Ok(())).unwrap();
        assert_eq!(disk.bytes[..image.len()], image);
        assert!(
            disk.bytes[image.len()..].iter().all(|byte| *byte == 0),
            "old bytes are left"
        );
        assert_eq!(disk.written_bytes, 64 * 1024);
    }
}

struct Ranges(Vec<Range<u64>>);

impl Data for Ranges {
    fn next(&mut self) -> Outcome<Option<Range<u64>>> {
        Ok(self.0.pop())
    }
}

fn all(shape: VolumeShape) -> Ranges {
    let whole = 0..shape.size_bytes;
    Ranges(vec![whole])
}

/// The non-zero ranges of `bytes`, in reverse order.
fn data_of(bytes: &[u8], unit: usize) -> Ranges {
    let units = bytes.chunks(unit).enumerate();
    let mut ranges: Vec<_> = units
        .filter(|(_, unit)| unit.iter().any(|byte| *byte != 0))
        .map(|(at, bytes)| (at * unit) as u64..(at * unit + bytes.len()) as u64)
        .collect();
    ranges.reverse();
    Ranges(ranges)
}

#[test]
fn an_export_is_sparse() {
    use std::os::unix::fs::MetadataExt;
    let content = pattern(&[(8 * MIB, 0), (4096, 1), (8 * MIB, 0)]);
    let mut disk = MemoryDisk::new(content.clone(), 4096, 16);
    let shape = disk.shape(None);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut sink = Sink::create(&path).unwrap();
    export(
        &mut disk,
        shape,
        &mut all(shape),
        &mut sink,
        &mut |_| Ok(()),
    )
    .unwrap();
    drop(sink);
    assert!(std::fs::read(&path).unwrap() == content);
    let metadata = std::fs::metadata(&path).unwrap();
    assert_eq!(metadata.len(), content.len() as u64);
    assert!(
        metadata.blocks() * 512 <= 128 * 1024,
        "{} blocks",
        metadata.blocks()
    );
}

#[test]
fn failures_end_a_transfer() {
    let image = pattern(&[(4 * MIB, 5)]);
    let mut disk = MemoryDisk::new(vec![0; 4 * MIB], 4096, 4);
    disk.fail_at = Some(2 << 20);
    let shape = disk.shape(None);
    let mut source = source_of(&image, false);
    let error = import(&mut disk, shape, &mut source, true, &mut |_| Ok(()));
    let message = error.unwrap_err().to_string();
    assert!(message.starts_with("no space at byte"), "{message}");
    let mut disk = MemoryDisk::new(vec![0; 2 * MIB], 4096, 4);
    let shape = disk.shape(None);
    let error = import(&mut disk, shape, &mut stream_of(&image), true, &mut |_| {
        Ok(())
    });
    let message = error.unwrap_err().to_string();
    assert!(
        message.contains("at least 2.5 MiB (2621440 bytes)")
            && message.contains("only 2 MiB (2097152 bytes)"),
        "{message}"
    );
    // Interrupted: an incomplete file is removed.
    let mut stop = |_| Err(Failure::new("interrupted"));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("image");
    let mut sink = Sink::create(&path).unwrap();
    assert!(export(&mut disk, shape, &mut all(shape), &mut sink, &mut stop).is_err());
    drop(sink);
    assert!(!path.exists());
}

/// Ends a transfer without progress.
fn stop_at_standstill() -> impl FnMut(u64) -> Outcome {
    let (mut place, mut times) = (0, 0);
    move |at| {
        times = if at == place { times + 1 } else { 0 };
        place = at;
        match times {
            0..10 => Ok(()),
            _ => Err(Failure::new("interrupted")),
        }
    }
}

/// While a pipe stalls, commands in flight end, and an interrupt ends the transfer.
#[test]
fn a_pipe_that_stands_still_is_interrupted() {
    let (input, sender) = rustix::pipe::pipe().unwrap();
    let (receiver, output) = rustix::pipe::pipe().unwrap();
    let mut sender = File::from(sender);
    let image = vec![7; 64 * 1024];
    std::io::Write::write_all(&mut sender, &image).unwrap();
    let mut source = Source::stream(File::from(input)).unwrap();
    source.read_head().unwrap();
    let mut disk = MemoryDisk::new(vec![0xaa; 8 * MIB], 4096, 4);
    let shape = disk.shape(Some(4096));
    let mut stop = stop_at_standstill();
    assert!(import(&mut disk, shape, &mut source, false, &mut stop).is_err());
    assert_eq!(
        (disk.flying.len(), &disk.bytes[..image.len()]),
        (0, &image[..])
    );
    let mut stop = stop_at_standstill();
    let mut sink = Sink::Stream(File::from(output));
    assert!(export(&mut disk, shape, &mut all(shape), &mut sink, &mut stop).is_err());
    assert_eq!(disk.flying.len(), 0);
    drop(receiver);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_imported_image_is_exported_unchanged(
        parts in prop::collection::vec((1usize..40, 0u8..3), 1..12),
        odd in 0usize..512,
        depth in 1usize..20,
        small_blocks: bool,
        fresh: bool,
        transfer in prop::option::of(1u64..64),
        streams: bool,
    ) {
        // In units that are no multiple of the granule.
        let parts: Vec<_> = parts.into_iter().map(|(units, value)| (units * 20_480, value)).collect();
        let mut image = pattern(&parts);
        image.truncate(image.len() - odd);
        let block_bytes = if small_blocks { 512 } else { 4096 };
        let size = image.len().next_multiple_of(block_bytes) + block_bytes;
        let old = if fresh { 0 } else { 0xaa };
        let mut disk = MemoryDisk::new(vec![old; size], block_bytes, depth);
        let shape = disk.shape(transfer.map(|units| units * 4096));
        let mut source = if streams { stream_of(&image) } else { source_of(&image, true) };
        let moved = import(&mut disk, shape, &mut source, fresh, &mut |_| Ok(())).unwrap();
        prop_assert_eq!(moved, image.len() as u64);
        prop_assert!(disk.bytes[..image.len()] == image);
        prop_assert!(disk.bytes[image.len()..].iter().all(|byte| *byte == 0));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        let stream = tempfile::tempfile().unwrap();
        let mut sink = match streams {
            true => Sink::Stream(stream.try_clone().unwrap()),
            false => Sink::create(&path).unwrap(),
        };
        let mut data = data_of(&disk.bytes, 65_536);
        export(&mut disk, shape, &mut data, &mut sink, &mut |_| Ok(())).unwrap();
        let read = match streams {
            true => whole(stream),
            false => std::fs::read(&path).unwrap(),
        };
        prop_assert!(read == disk.bytes);
    }
}
