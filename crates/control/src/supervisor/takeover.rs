//! Events of a take-over.
//!
//! Only a long fence and the last one become events, because a pool has many devices. Devices added
//! later don't count: the dead engine has nothing in flight there.

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::Instant;

use super::Supervisor;
use crate::events::EventFields;
use crate::model::events::EventKind;
use crate::owner::session::{Conversion, Session};

/// The engine's name for connections that had ended before the death; the take-over did not close
/// them.
const ENDED_BEFORE: &str = "ended before";
/// A longer fence gets its own event.
const LONG_FENCE: Duration = Duration::from_secs(1);

impl Supervisor {
    pub(super) fn took_over(&self, generation: u64, from: Option<u64>, conversion: &Conversion) {
        let pause = self.died_at.take().map(|at| at.elapsed());
        self.line.converted();
        let closed = conversion.closed.iter();
        let closed = closed.filter(|(why, _)| why != ENDED_BEFORE);
        let closed: u32 = closed.map(|(_, count)| count).sum();
        let text = format!(
            "generation {generation} continues where generation {} stopped, after {:.1} ms: {} queues with {} \
            commands, {} VMs; {closed} connections closed",
            from.unwrap_or(0),
            pause.unwrap_or_default().as_secs_f64() * 1e3,
            conversion.queues,
            conversion.commands,
            conversion.vms,
        );
        let fields = EventFields {
            pause,
            closed: conversion.closed.clone(),
            ..EventFields::default()
        };
        self.events
            .report(EventKind::TookOver, generation, text, fields);
    }

    pub(super) async fn note_fences(
        &self,
        session: &Session,
        died_at: Option<Instant>,
    ) -> Infallible {
        let Some(died_at) = died_at else {
            return std::future::pending().await;
        };
        let mut waiting = session.published_devices().await;
        while !waiting.is_empty() {
            let Some(device) = session.next_fence(&mut waiting).await else {
                continue;
            };
            let fence = died_at.elapsed();
            self.events.note_fence(device.0, fence);
            let ms = fence.as_secs_f64() * 1e3;
            let text = if waiting.is_empty() {
                format!(
                    "{ms:.1} ms after the engine's death, its last requests have ended on every device; {device} was \
                    the last"
                )
            } else if fence >= LONG_FENCE {
                format!(
                    "{ms:.1} ms after the engine's death, its last requests have ended on {device}"
                )
            } else {
                continue;
            };
            let fields = EventFields {
                fence: Some((device.0, fence)),
                ..EventFields::default()
            };
            self.events
                .report(EventKind::FencePassed, session.generation, text, fields);
        }
        std::future::pending().await
    }
}
