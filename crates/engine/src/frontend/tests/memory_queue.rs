//! A frontend for tests: a queue in memory, whose clients are threads of the test.
//!
//! It shows what a new protocol needs: this file, and its line in
//! [`MAKERS`](crate::frontend::MAKERS).

use crate::core::{CommandRef, Core, DoneIo, FrontendIndex, IoOp, Issuer, NewIo};
use crate::frontend::{Beside, Frontend, FrontendMessage, FrontendParts};
use forebay_nvme::Status;
use forebay_xlate::boundary::message::ExportId;
use std::collections::VecDeque;
use std::sync::mpsc::Sender;

pub(super) struct Request {
    pub export: ExportId,
    pub op: IoOp,
    /// Data to write.
    pub data: Vec<u8>,
    pub answer: Sender<(Status, Vec<u8>)>,
}

struct MemoryQueue {
    index: FrontendIndex,
    waiting: VecDeque<Request>,
    started: Vec<Option<Request>>,
}

pub(in crate::frontend) fn make(
    index: FrontendIndex,
    _: &mut FrontendParts,
) -> Option<Box<dyn Frontend>> {
    Some(Box::new(MemoryQueue {
        index,
        waiting: VecDeque::new(),
        started: Vec::new(),
    }))
}

impl MemoryQueue {
    fn start(&mut self, core: &mut Core, request: Request) {
        let (IoOp::Read { len_bytes, .. } | IoOp::Write { len_bytes, .. }) = request.op else {
            return;
        };
        let lane = core.lanes.of_export(request.export).unwrap();
        let mut buffer = core.staging.allocate(len_bytes).unwrap();
        buffer.as_mut_slice()[..request.data.len()].copy_from_slice(&request.data);
        let slot = self.started.len() as u16;
        let new = NewIo {
            owner: Issuer {
                frontend: self.index,
                conn: 0,
                conn_generation: 0,
                slot,
            },
            lane,
            op: request.op,
            buffer: Some(buffer),
            record: CommandRef::new(0, slot),
            over_ns: None,
        };
        self.started.push(Some(request));
        assert!(core.start(new).is_ok());
    }

    fn ended(&mut self, core: &mut Core, done: DoneIo) {
        let buffer = done.buffer.unwrap();
        let request = self.started[usize::from(done.owner.slot)].take().unwrap();
        let answer = (done.status, buffer.as_slice().to_vec());
        core.staging.release(buffer);
        request.answer.send(answer).unwrap();
    }
}

impl Frontend for MemoryQueue {
    fn poll(&mut self, core: &mut Core, beside: Beside<'_>) -> bool {
        let mut any = false;
        while let Some(done) = core.next_ended(self.index) {
            any = true;
            self.ended(core, done);
        }
        while let Some(request) = self.waiting.pop_front() {
            any = true;
            self.start(core, request);
            beside(core);
        }
        any
    }

    fn sockets_ready(&mut self, _: &mut Core, _: &[u64]) {}

    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
    }

    fn arm(&mut self, core: &mut Core) -> bool {
        !core.has_ended(self.index)
    }

    fn retry_within_ns(&self) -> Option<u64> {
        None
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        None
    }

    fn tick(&mut self, _: &mut Core) {}

    fn accept(&mut self, _: &mut Core, message: FrontendMessage) -> Result<(), FrontendMessage> {
        self.waiting.push_back(*message.downcast::<Request>()?);
        Ok(())
    }

    fn export_changed(&mut self, _: &mut Core, _: ExportId) -> u32 {
        0
    }

    fn export_removed(&mut self, _: &mut Core, _: ExportId) -> u32 {
        0
    }

    fn close_all(&mut self, _: &mut Core) {
        self.waiting.clear();
    }

    fn count(&self) -> usize {
        self.started.iter().flatten().count()
    }
}
