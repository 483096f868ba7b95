//! Engines die at each step of a message, and the successor continues.

use super::*;

/// Messages of [`wherever_it_dies`]: bytes, descriptor, answer.
fn script() -> Vec<(Vec<u8>, Option<OwnedFd>, Vec<u8>)> {
    let yes = 1u32.to_le_bytes().to_vec();
    let echo = message(Echo, 0, b"whatever");
    vec![
        (message(Post, 0, b"x"), None, vec![]),
        (message(Map, 1, b""), Some(memory()), yes.clone()),
        (echo.clone(), None, echo),
        (message(Hold, 3, b""), Some(bell()), yes.clone()),
        (message(Map, 2, b""), Some(memory()), yes.clone()),
        (message(Unmap, 1, b""), None, yes.clone()),
        (message(Own, 5, b""), None, yes.clone()),
        (message(Post, 0, b""), Some(bell()), vec![]),
        (message(Hold, 3, b""), Some(bell()), yes.clone()),
        (message(Map, 1, b""), Some(memory()), yes),
    ]
}

fn wherever_it_dies(point: &str, at_once: bool) {
    let all = script().into_iter();
    let all = all.filter(|(_, _, answer)| point != "vm.answering" || !answer.is_empty());
    for at in 1..=all.count() as u32 {
        let mut rig = Rig::new();
        let mut deaths = 0;
        arm_here(point, at);
        let mut expected = Vec::new();
        let mut answers = Vec::new();
        for (bytes, fd, answer) in script() {
            let fds: Vec<_> = fd.iter().map(AsFd::as_fd).collect();
            rig.send(&bytes, &fds);
            expected.extend_from_slice(&answer);
            if at_once {
                continue;
            }
            while rig.dies() {
                deaths += 1;
                rig.succeed(None);
            }
            answers.extend(rig.answers());
        }
        while rig.dies() {
            deaths += 1;
            rig.succeed(None);
        }
        answers.extend(rig.answers());
        arm_here("over.adopted", 0);
        assert_eq!(rig.left, [""; 0], "{point} {at}");
        assert_eq!(deaths, 1, "{point} {at}");
        assert_eq!(answers, expected, "{point} {at}");
        assert_eq!(rig.pages(), [1, 2], "{point} {at}");
        assert_eq!(rig.slots(), [3, 5], "{point} {at}");
        // The daemon has exactly the deposits in use.
        assert_eq!(rig.deposits.len(), 4, "{point} {at}");
        assert_eq!(rig.client().deposits.len(), 4, "{point} {at}");
        rig.send(&message(Raise, 3, b""), &[]);
        rig.run();
        assert_eq!(rig.answers(), 1u32.to_le_bytes());
    }
}

#[test]
fn a_message_is_answered_once_wherever_the_engine_dies() {
    for point in [
        "vm.deposited",
        "vm.intent",
        "vm.applied",
        "vm.answering",
        "vm.sent",
        "vm.answered",
        "vm.consumed",
    ] {
        wherever_it_dies(point, false);
        wherever_it_dies(point, true);
    }
}

#[test]
fn an_answer_that_was_read_is_not_given_again() {
    for before in [0, 1] {
        let mut rig = Rig::new();
        let echo = message(Echo, 0, b"x");
        arm_here("vm.sent", before + 1);
        for _ in 0..=before {
            rig.send(&echo, &[]);
        }
        assert!(rig.dies());
        let read = rig.answers();
        assert_eq!(
            read,
            echo.repeat(before as usize + 1),
            "read before anybody looks"
        );
        rig.succeed(None);
        rig.run();
        assert_eq!(rig.answers(), b"");
        rig.send(&echo, &[]);
        rig.run();
        assert_eq!((rig.answers(), rig.left.len()), (echo, 0));
        let echo = message(Echo, 0, b"again");
        arm_here("vm.answering", 2);
        rig.send(&echo, &[]);
        rig.send(&echo, &[]);
        assert!(rig.dies());
        rig.succeed(None);
        rig.run();
        assert_eq!((rig.answers(), rig.left.len()), (echo.repeat(2), 0));
    }
}

#[test]
fn an_answer_of_which_a_part_is_gone_ends_the_client() {
    let mut rig = Rig::new();
    arm_here("vm.sent", 1);
    rig.send(&message(Echo, 0, b"x"), &[]);
    assert!(rig.dies());
    // As if the socket had taken only a part.
    rig.vm_file().begin_answer(100);
    answer::send(&rig.ours, b"part", None, rig.vm_file().note()).unwrap();
    rig.succeed(None);
    rig.run();
    assert_eq!(rig.left, ["the engine died in the middle of an answer"]);
    assert_eq!(rig.vms.count(), 0);
}

#[test]
fn a_client_whose_message_crashes_engines_is_disconnected() {
    let mut rig = Rig::new();
    arm_here("vm.intent", 1);
    rig.send(&message(Echo, 0, b"x"), &[]);
    assert!(rig.dies());
    arm_here("vm.intent", 1);
    rig.succeed(Some(None));
    assert!(rig.dies(), "once more");
    rig.succeed(Some(None));
    rig.run();
    assert_eq!(rig.left.len(), 1);
    assert!(rig.left[0].contains("crashed"), "{}", rig.left[0]);
    // Messages in between do not help; only time does.
    for (waits, closed) in [(0, true), (talk::CALM_NS, false)] {
        let mut rig = Rig::new();
        for _ in 0..2 {
            rig.send(&message(Echo, 0, b"x"), &[]);
            rig.run();
            let later = rig.core.now_ns() + waits;
            rig.core.clock.set_now_ns(later);
            rig.send(&message(Post, 0, b""), &[]);
            for vm in rig.vms.all.iter_mut().flatten() {
                vm.talk.ready();
            }
            while rig.vms.poll_all(&mut rig.core) {}
            rig.succeed(Some(None));
            rig.run();
        }
        assert_eq!(
            rig.left.len(),
            usize::from(closed),
            "{waits}: {:?}",
            rig.left
        );
    }
    // Crashes that are not its fault do not count.
    let mut rig = Rig::new();
    for _ in 0..5 {
        arm_here("vm.intent", 1);
        rig.send(&message(Post, 0, b""), &[]);
        assert!(rig.dies());
        rig.succeed(None);
    }
    arm_here("vm.intent", 0);
    rig.run();
    assert_eq!(rig.left, [""; 0]);
}

#[test]
fn any_damaged_word_of_a_vm_file_ends_only_its_client() {
    // Each word of the header, the first region and the first slot in turn.
    let places = (4..10u64)
        .chain([19, 20, 22, 29])
        .chain(512..520)
        .chain(4608..4612);
    for (place, value) in places.flat_map(|p| [(p, u64::MAX), (p, 3), (p, 0), (p, 1 << 40)]) {
        let mut rig = Rig::new();
        rig.send(&message(Map, 1, b""), &[memory().as_fd()]);
        rig.send(&message(Hold, 0, b""), &[bell().as_fd()]);
        rig.run();
        rustix::io::pwrite(&rig.file, &value.to_ne_bytes(), place * 8).unwrap();
        rig.succeed(None);
        let _ = rustix::net::send(&rig.client, &message(Echo, 0, b"x"), SendFlags::NOSIGNAL);
        rig.run();
        assert!(rig.left.len() <= 1, "{place} {value}");
    }
}
