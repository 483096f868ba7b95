//! Judges why an engine died, and which export's command was at fault.
//!
//! A crashing engine records the thread in its header; the daemon records a stuck one. That
//! thread's current command is blamed. An engine that is merely killed blames nothing. The dead
//! engine's records are untrusted: a wrong one only blames another of its commands.
//! `exports::quarantine` acts on the result.

use std::sync::atomic::Ordering::Relaxed;

use forebay_pool::ExportId;
use forebay_xlate::boundary::message::{Blamed, ExportId as EngineExportId};
use forebay_xlate::boundary::region::{Blame, MAX_CONTROLLERS, MAX_REACTORS, Region};

use super::process::{OUT_OF_MEMORY, signal_name};
use super::watchdog::CONTROL;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) cause: String,
    /// It crashed, ran out of memory or was stuck; it was not just killed from outside.
    pub(super) crashed: bool,
    pub(super) blamed: Option<Blamed>,
    pub(super) export: Option<ExportId>,
}

impl Verdict {
    /// Whether the death of a young engine, or of one that never served, delays the next start. A
    /// kill from outside does not, nor a death with an export at fault: quarantine ends those.
    pub(super) fn delays(&self, young: bool, served: bool) -> bool {
        young && self.export.is_none() && (self.crashed || !served)
    }
}

pub(super) fn judge(region: Option<&Region>, how: &str) -> Verdict {
    let mut verdict = Verdict {
        cause: how.to_owned(),
        // Without memory, an engine dies again and again, like one that crashes.
        crashed: how.contains(OUT_OF_MEMORY)
            || !how.contains("SIGKILL") && !how.starts_with("unknown"),
        blamed: None,
        export: None,
    };
    let Some(region) = region else { return verdict };
    let (crash, stuck) = (
        region.header().crash.load(Relaxed),
        region.header().stuck.load(Relaxed),
    );
    let thread = if crash != 0 {
        let signal = (crash >> 32) as i32;
        verdict.cause = format!("it crashed with signal {signal}{}", signal_name(signal));
        crash & u64::from(u32::MAX)
    } else if stuck != 0 {
        verdict.cause = "it was stuck".to_owned();
        stuck
    } else {
        return verdict;
    };
    verdict.crashed = true;
    match thread.checked_sub(1) {
        Some(reactor) if reactor < MAX_REACTORS as u64 => {
            let reactor = reactor as usize;
            let text = working_on(region, reactor);
            verdict.cause = format!("{} in reactor {reactor}, {text}", verdict.cause);
            if let Some((export, slot)) = vm_of(region, reactor) {
                verdict.blamed = Some(Blamed::Vm {
                    export: EngineExportId(export.0),
                    slot,
                });
                verdict.export = Some(export);
            }
            if let Some(Blame { queue, slot }) = region.blamed(reactor) {
                verdict.blamed = Some(Blamed::Queue { queue, slot });
                verdict.export = export_of(region, queue);
            }
        }
        _ => {
            let text = working_on(region, CONTROL);
            verdict.cause = format!("{} outside the reactors, {text}", verdict.cause);
            let handshake = region.header().handshake.load(Relaxed);
            if handshake != 0 {
                verdict.blamed = Some(Blamed::Handshake { socket: handshake });
            }
        }
    }
    verdict
}

pub(super) fn working_on(region: &Region, reactor: usize) -> String {
    if reactor >= MAX_REACTORS {
        return match region.header().handshake.load(Relaxed) {
            0 => "working for no connection".to_owned(),
            _ => "handling a new connection".to_owned(),
        };
    }
    if let Some((_, slot)) = vm_of(region, reactor) {
        return match slot {
            Some(slot) => format!("working on command {slot} of a VM"),
            None => "working on a VM's messages or rings".to_owned(),
        };
    }
    match region.blamed(reactor) {
        None => "working for no host".to_owned(),
        Some(Blame { queue, slot: None }) => format!("working on the input of queue {queue}"),
        Some(Blame {
            queue,
            slot: Some(slot),
        }) => {
            let command = region.commands(queue as usize).get(usize::from(slot));
            let what = command.map_or_else(String::new, |command| {
                let sqe = |word: usize| command.sqe[word].load(Relaxed);
                // NVMe Base: CDW0 bits 7:0 OPC; NVM Command Set: CDW10 and 11 SLBA.
                format!(" (opcode {:#04x}, block {})", sqe(0) as u8, sqe(5))
            });
            format!("working on command {slot} of queue {queue}{what}")
        }
    }
}

pub(super) fn export_in_work(region: &Region, reactor: usize) -> Option<ExportId> {
    if let Some((export, _)) = vm_of(region, reactor) {
        return Some(export);
    }
    let record = region.reactors().get(reactor)?;
    let blame = Blame::of_word(record.blame.load(Relaxed))?;
    export_of(region, blame.queue)
}

/// The command number is `None` between commands.
fn vm_of(region: &Region, reactor: usize) -> Option<(ExportId, Option<u16>)> {
    let word = region.reactors().get(reactor)?.blame.load(Relaxed);
    let (lane, slot) = Blame::vm_of_word(word)?;
    let lane = region.lanes().get(lane as usize)?;
    let export = lane.export.load(Relaxed).checked_sub(1)?;
    Some((ExportId(export), slot))
}

fn export_of(region: &Region, queue: u32) -> Option<ExportId> {
    let queue = region.queues().get(queue as usize)?;
    let controller = queue.controller.load(Relaxed);
    if controller >= MAX_CONTROLLERS as u64 {
        return None;
    }
    let controller = &region.controllers()[controller as usize];
    let export = controller.export.load(Relaxed).checked_sub(1)?;
    Some(ExportId(export))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_crash_blames() {
        let region = Region::anonymous(1).unwrap();
        let reactor = &region.reactors()[2];
        reactor.blame.store(Blame::command(7, 9), Relaxed);
        region.queues()[7].controller.store(4, Relaxed);
        region.controllers()[4].export.store(12, Relaxed);
        let command = &region.commands(7)[9];
        command.sqe[0].store(0x0000_0001_0007_0002, Relaxed);
        command.sqe[5].store(1234, Relaxed);

        let killed = judge(Some(&region), "signal 9 (SIGKILL)");
        assert_eq!((killed.blamed, killed.crashed), (None, false));
        assert!(judge(None, "exit code 3").crashed);
        let no_memory = judge(
            Some(&region),
            &format!("signal 9 (SIGKILL); {OUT_OF_MEMORY}"),
        );
        assert_eq!((no_memory.blamed, no_memory.crashed), (None, true));

        region.header().stuck.store(3, Relaxed);
        let stuck = judge(Some(&region), "signal 9 (SIGKILL)");
        let blamed = Blamed::Queue {
            queue: 7,
            slot: Some(9),
        };
        assert_eq!(stuck.blamed, Some(blamed));
        assert_eq!(stuck.export, Some(ExportId(11)));
        assert_eq!(export_in_work(&region, 2), Some(ExportId(11)));
        assert_eq!(export_in_work(&region, 3), None);
        assert!(!stuck.delays(true, true), "others do not wait for it");
        assert!(!killed.delays(true, true) && killed.delays(true, false));
        let unknown = judge(None, "exit code 3");
        assert!(unknown.delays(true, true) && !unknown.delays(false, true));
        assert_eq!(
            stuck.cause,
            "it was stuck in reactor 2, working on command 9 of queue 7 (opcode 0x02, block 1234)"
        );

        region.header().stuck.store(0, Relaxed);
        region.header().crash.store(6 << 32 | 3, Relaxed);
        reactor.blame.store(Blame::queue(7), Relaxed);
        let crashed = judge(Some(&region), "unknown");
        assert_eq!(
            crashed.blamed,
            Some(Blamed::Queue {
                queue: 7,
                slot: None
            })
        );
        assert!(crashed.cause.contains("SIGABRT"), "{}", crashed.cause);

        region.lanes()[5].export.store(21, Relaxed);
        reactor.blame.store(Blame::vm(5, 700), Relaxed);
        let crashed = judge(Some(&region), "unknown");
        let vm = Blamed::Vm {
            export: EngineExportId(20),
            slot: Some(700),
        };
        assert_eq!(crashed.blamed, Some(vm));
        assert_eq!(crashed.export, Some(ExportId(20)));
        assert_eq!(export_in_work(&region, 2), Some(ExportId(20)));
        assert!(crashed.cause.contains("command 700 of a VM"));

        region.header().crash.store(11 << 32, Relaxed);
        assert_eq!(judge(Some(&region), "x").blamed, None);
        region.header().handshake.store(77, Relaxed);
        let handshake = Some(Blamed::Handshake { socket: 77 });
        assert_eq!(judge(Some(&region), "x").blamed, handshake);
        region.header().crash.store(0, Relaxed);
        region.header().stuck.store(CONTROL as u64 + 1, Relaxed);
        let stuck = judge(Some(&region), "x");
        assert_eq!((stuck.blamed, stuck.crashed), (handshake, true));
        assert_eq!(
            stuck.cause,
            "it was stuck outside the reactors, handling a new connection"
        );
    }

    #[test]
    fn any_words_are_survived() {
        let region = Region::anonymous(1).unwrap();
        for word in [1, 64, 65, u64::from(u32::MAX), u64::MAX, 1 << 63] {
            region.header().crash.store(word, Relaxed);
            for blame in [0, 1, 1 << 16, 4096 << 16, 4097 << 16, u64::MAX] {
                for reactor in region.reactors() {
                    reactor.blame.store(blame, Relaxed);
                }
                for controller in [0, 2047, 2048, u64::MAX] {
                    region.queues()[4095].controller.store(controller, Relaxed);
                    region.queues()[0].controller.store(controller, Relaxed);
                    judge(Some(&region), "x");
                }
            }
        }
    }
}
