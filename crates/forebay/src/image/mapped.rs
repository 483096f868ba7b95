//! The ranges where a volume may hold data, from the daemon.

use std::collections::VecDeque;
use std::ops::Range;

use forebay_control::api::client::Client;
use forebay_control::model::VolumeExtents;

use super::transfer::Data;
use crate::api_paths;
use crate::cli::names::VolumeName;
use crate::failure::Outcome;

pub(super) struct Mapped<'a> {
    client: &'a Client,
    path: String,
    page: VecDeque<Range<u64>>,
    next_bytes: Option<u64>,
}

impl<'a> Mapped<'a> {
    pub(super) fn new(client: &'a Client, name: &VolumeName) -> Self {
        Self {
            client,
            path: format!("{}/extents", api_paths::volume(name)),
            page: VecDeque::new(),
            next_bytes: Some(0),
        }
    }
}

impl Data for Mapped<'_> {
    fn next(&mut self) -> Outcome<Option<Range<u64>>> {
        while self.page.is_empty()
            && let Some(from) = self.next_bytes
        {
            let path = format!("{}?from_bytes={from}", self.path);
            let said: VolumeExtents = self.client.get(&path)?;
            let ranges = said.extents.iter();
            self.page
                .extend(ranges.map(|e| e.offset_bytes..e.offset_bytes + e.len_bytes));
            self.next_bytes = said.next_bytes;
        }
        Ok(self.page.pop_front())
    }
}
