//! What an operator hears of a take-over.
//!
//! Purpose: what it took over and how long hosts waited; when the dead engine's last request had ended.
//! Design: each device's fence is measured, but only one that was long, and the last one, is an event:
//! a pool has many devices. Only devices that the successor was told of in the beginning count: one that
//! comes later has nothing of the dead engine in flight that anybody waits for.
//! Not here: why an estate is dropped ([`super::line`]).

use std::convert::Infallible;
use std::time::Duration;

use tokio::time::Instant;

use super::Supervisor;
use crate::events::News;
use crate::model::events::EventKind;
use crate::owner::session::{Conversion, Session};

/// What the engine says of connections that somebody had ended before the death: they are counted, but it was not the
/// take-over that closed them.
const ENDED_BEFORE: &str = "ended before";
/// A fence that took longer is told by itself.
const LONG_FENCE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// A successor acts.
    pub(super) fn took_over(&self, generation: u64, from: Option<u64>, conversion: &Conversion) {
        let pause = self.died_at.take().map(|at| at.elapsed());
        self.line.converted();
        let closed = conversion.closed.iter();
        let closed = closed.filter(|(why, _)| why != ENDED_BEFORE);
        let closed: u32 = closed.map(|(_, count)| count).sum();
        let text = format!(
            "generation {generation} goes on where generation {} stopped, after {:.1} ms: {} queues with {} commands, {} machines; {closed} connections closed",
            from.unwrap_or(0),
            pause.unwrap_or_default().as_secs_f64() * 1e3,
            conversion.queues,
            conversion.commands,
            conversion.machines,
        );
        let news = News {
            pause,
            closed: conversion.closed.clone(),
            ..News::default()
        };
        self.events
            .tell(EventKind::TookOver, generation, text, news);
    }

    /// Tells how long after a death the engine got the devices to itself.
    pub(super) async fn note_fences(
        &self,
        session: &Session,
        died_at: Option<Instant>,
    ) -> Infallible {
        let Some(died_at) = died_at else {
            return std::future::pending().await;
        };
        let mut waiting = session.devices_told().await;
        while !waiting.is_empty() {
            let Some(device) = session.next_fence(&mut waiting).await else {
                continue;
            };
            let fence = died_at.elapsed();
            self.events.note_fence(device.0, fence);
            let ms = fence.as_secs_f64() * 1e3;
            let text = if waiting.is_empty() {
                format!(
                    "{ms:.1} ms after the engine's death the new one has every device to itself; {device} was the last"
                )
            } else if fence >= LONG_FENCE {
                format!("{ms:.1} ms after the engine's death the new one has {device} to itself")
            } else {
                continue;
            };
            let news = News {
                fence: Some((device.0, fence)),
                ..News::default()
            };
            self.events
                .tell(EventKind::FencePassed, session.generation, text, news);
        }
        std::future::pending().await
    }
}
