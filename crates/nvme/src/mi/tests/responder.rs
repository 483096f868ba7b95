//! Command slots.

use super::*;
use endpoint_state as state;

type Step<'m> = MiStep<'m, u8>;
type Sent = Vec<(u8, Vec<u8>)>;

/// The address of the command; of control primitives it is 2.
const HOST: u8 = 1;

fn poll(slot: usize) -> Vec<u8> {
    MiRequest::Command(MiCommand::SubsystemHealth { clear: false }).encode(slot)
}

fn begin(responder: &mut Responder<u8>, slot: usize) -> MiTicket {
    let message = poll(slot);
    let step = responder.receive(HOST, &message);
    step.execute.expect("a command").0
}

const DONE: MiResponse<'_> = MiResponse::Command {
    value: 7,
    data: &[1, 2, 3],
};

fn done(slot: usize) -> Vec<u8> {
    DONE.encode(MiKind::Command, slot)
}

/// CPSR, and the messages after the primitive's response.
fn control(
    responder: &mut Responder<u8>,
    slot: usize,
    primitive: ControlPrimitive,
) -> (u16, Sent, Option<MiTicket>) {
    let message = MiRequest::Control(primitive, 0x5A).encode(slot);
    let mut step: Step<'_> = responder.receive(2, &message);
    assert!(step.execute.is_none() && step.dropped.is_none());
    let (to, response) = step.send.remove(0);
    let Ok((_, MiResponse::Control { tag: 0x5A, value })) = MiResponse::decode(&response) else {
        panic!("{response:x?}")
    };
    assert_eq!(to, 2);
    (value, step.send, step.abandoned)
}

fn get_state(responder: &mut Responder<u8>, slot: usize, clear_errors: bool) -> u16 {
    control(responder, slot, ControlPrimitive::GetState { clear_errors }).0
}

const REPLAY: ControlPrimitive = ControlPrimitive::Replay { first_packet: 0 };

#[test]
fn two_slots_work_at_once() {
    let mut responder = Responder::new();
    let (first, second) = (begin(&mut responder, 0), begin(&mut responder, 1));
    assert_eq!(get_state(&mut responder, 0, false), state::PROCESS);
    assert!(!responder.is_idle());
    assert_eq!(responder.complete(second, &DONE), Some((HOST, done(1))));
    assert_eq!(get_state(&mut responder, 1, false), state::IDLE);
    assert_eq!(responder.complete(first, &DONE), Some((HOST, done(0))));
    assert!(responder.is_idle());
    // A command is completed once.
    assert_eq!(responder.complete(first, &DONE), None);
    begin(&mut responder, 0);
    assert_eq!(responder.complete(first, &DONE), None);
    assert_eq!(responder.more_processing(first, 5), None);
}

#[test]
fn a_command_to_a_busy_slot_is_dropped_and_noted() {
    let mut responder = Responder::new();
    let ticket = begin(&mut responder, 0);
    let message = poll(0);
    let step = responder.receive(3, &message);
    assert_eq!(step.dropped, Some(MiDrop::SlotBusy));
    assert!(step.send.is_empty() && step.execute.is_none());
    // Nor does a malformed one get an answer.
    let message = sealed(&[0x84, 0x08, 0, 0]);
    let step = responder.receive(3, &message);
    assert_eq!(step.dropped, Some(MiDrop::SlotBusy));
    let noted = state::PROCESS | state::SLOT_BUSY;
    assert_eq!(get_state(&mut responder, 0, true), noted);
    assert_eq!(get_state(&mut responder, 0, false), state::PROCESS);
    assert_eq!(responder.complete(ticket, &DONE), Some((HOST, done(0))));
}

#[test]
fn broken_messages_are_dropped() {
    let mut responder = Responder::new();
    let mut corrupt = poll(0);
    corrupt[9] ^= 1;
    let cases: [(&[u8], MiDrop); 4] = [
        (&[0x84, 0x08], MiDrop::Broken(BrokenMessage::Short)),
        (
            &sealed(&[0x04, 0x08, 0, 0]),
            MiDrop::Broken(BrokenMessage::Type),
        ),
        (&done(0), MiDrop::Response),
        (&corrupt, MiDrop::Broken(BrokenMessage::Check)),
    ];
    for (message, dropped) in cases {
        assert_eq!(get_state(&mut responder, 0, false), 0);
        let step = responder.receive(HOST, message);
        assert_eq!(step.dropped, Some(dropped));
        assert!(step.send.is_empty() && step.execute.is_none());
    }
    assert_eq!(get_state(&mut responder, 0, false), state::BAD_CHECK);
}

#[test]
fn errors_of_the_transport_are_shown_until_cleared() {
    let mut responder = Responder::new();
    // State bits are not errors.
    responder.note_errors(state::OUT_OF_SEQUENCE | state::PAUSED | state::TRANSMIT);
    assert_eq!(get_state(&mut responder, 1, false), state::OUT_OF_SEQUENCE);
    assert_eq!(get_state(&mut responder, 0, true), state::OUT_OF_SEQUENCE);
    assert_eq!(get_state(&mut responder, 0, true), 0);
}

#[test]
fn a_pause_holds_responses_back() {
    let mut responder = Responder::new();
    let (first, second) = (begin(&mut responder, 0), begin(&mut responder, 1));
    assert_eq!(control(&mut responder, 0, ControlPrimitive::Pause).0, 3);
    assert_eq!(responder.more_processing(first, 5), None);
    assert_eq!(
        get_state(&mut responder, 1, false),
        state::PROCESS | state::PAUSED
    );
    assert_eq!(responder.complete(first, &DONE), None);
    assert_eq!(
        get_state(&mut responder, 0, false),
        state::TRANSMIT | state::PAUSED
    );
    let message = poll(0);
    assert_eq!(
        responder.receive(HOST, &message).dropped,
        Some(MiDrop::SlotBusy)
    );
    let (_, sent, _) = control(&mut responder, 0, ControlPrimitive::Resume);
    assert_eq!(sent, [(HOST, done(0))]);
    assert_eq!(responder.complete(second, &DONE), Some((HOST, done(1))));
    // Idle slots are not paused.
    control(&mut responder, 0, ControlPrimitive::Pause);
    assert_eq!(get_state(&mut responder, 0, true), state::SLOT_BUSY);
    let ticket = begin(&mut responder, 0);
    assert!(responder.complete(ticket, &DONE).is_some());
}

#[test]
fn an_aborted_command_sends_nothing() {
    let mut responder = Responder::new();
    let ticket = begin(&mut responder, 1);
    let aborted = control(&mut responder, 0, ControlPrimitive::Abort);
    assert_eq!(aborted, (0, vec![], None));
    let aborted = control(&mut responder, 1, ControlPrimitive::Abort);
    assert_eq!(aborted, (2, vec![], Some(ticket)));
    assert!(responder.is_idle());
    assert_eq!(responder.complete(ticket, &DONE), None);
    // A held response goes, too, and so does the pause.
    let ticket = begin(&mut responder, 1);
    control(&mut responder, 0, ControlPrimitive::Pause);
    responder.complete(ticket, &DONE);
    assert_eq!(
        control(&mut responder, 1, ControlPrimitive::Abort),
        (0, vec![], None)
    );
    assert_eq!(get_state(&mut responder, 1, false), state::IDLE);
    assert_eq!(control(&mut responder, 1, REPLAY), (0, vec![], None));
}

#[test]
fn the_last_response_is_replayed() {
    let mut responder = Responder::new();
    assert_eq!(control(&mut responder, 0, REPLAY), (0, vec![], None));
    let ticket = begin(&mut responder, 0);
    assert_eq!(control(&mut responder, 0, REPLAY), (0, vec![], None));
    responder.complete(ticket, &DONE);
    // To the replay's address, as often as asked.
    for _ in 0..2 {
        assert_eq!(
            control(&mut responder, 0, REPLAY),
            (1, vec![(2, done(0))], None)
        );
    }
    assert_eq!(control(&mut responder, 1, REPLAY), (0, vec![], None));
    // Refusals can be replayed.
    let refused = responder.receive(HOST, &sealed(&[0x84, 0x08, 0, 0])).send;
    let (_, replayed, _) = control(&mut responder, 0, REPLAY);
    assert_eq!(replayed, [(2, refused[0].1.clone())]);
    // The next command ends that.
    begin(&mut responder, 0);
    assert_eq!(control(&mut responder, 0, REPLAY), (0, vec![], None));
}

#[test]
fn a_replay_resumes_both_slots() {
    let mut responder = Responder::new();
    let tickets = [begin(&mut responder, 0), begin(&mut responder, 1)];
    control(&mut responder, 0, ControlPrimitive::Pause);
    for ticket in tickets {
        responder.complete(ticket, &DONE);
    }
    let (value, sent, _) = control(&mut responder, 0, REPLAY);
    assert_eq!((value, sent), (1, vec![(2, done(0)), (HOST, done(1))]));
    assert!(responder.is_idle());
    assert_eq!(get_state(&mut responder, 0, false), state::IDLE);
}

#[test]
fn a_late_response_follows_more_processing_required() {
    let mut responder = Responder::new();
    let ticket = begin(&mut responder, 0);
    let more = MiResponse::MoreProcessing { time: 50 }.encode(MiKind::Command, 0);
    assert_eq!(
        responder.more_processing(ticket, 50),
        Some((HOST, more.clone()))
    );
    assert_eq!(responder.more_processing(ticket, 50), None);
    assert_eq!(get_state(&mut responder, 0, false), state::PROCESS);
    assert_eq!(
        control(&mut responder, 0, REPLAY),
        (1, vec![(2, more)], None)
    );
    assert_eq!(responder.complete(ticket, &DONE), Some((HOST, done(0))));
    assert_eq!(
        control(&mut responder, 0, REPLAY),
        (1, vec![(2, done(0))], None)
    );
}

proptest! {
    /// Each accepted command gets one response, unless it is aborted; slots never hang.
    #[test]
    fn any_messages_leave_working_slots(
        messages in prop::collection::vec((any_message(), 0..4_u8), 0..60),
    ) {
        let mut responder = Responder::new();
        let mut tickets = Vec::new();
        for (message, action) in &messages {
            let step = responder.receive(HOST, message);
            prop_assert!(step.send.len() <= 3);
            if step.dropped.is_some() {
                prop_assert!(step.send.is_empty() && step.execute.is_none());
            }
            tickets.retain(|ticket| Some(*ticket) != step.abandoned);
            tickets.extend(step.execute.map(|(ticket, _)| ticket));
            prop_assert!(tickets.len() <= SLOTS);
            if *action == 0 && let Some(ticket) = tickets.pop() {
                responder.more_processing(ticket, 1);
                responder.complete(ticket, &DONE);
            }
        }
        for ticket in tickets {
            responder.complete(ticket, &DONE);
        }
        control(&mut responder, 0, ControlPrimitive::Resume);
        prop_assert!(responder.is_idle());
    }
}
