//! Tests that each kind of controller answers its declared commands and no others.
//!
//! Checks every opcode, log page, feature and CNS value against the lists, with a new controller
//! per probe.

use super::*;
use crate::identify::{
    IdentifyController, IdentifyNamespace, PrimaryController, SecondaryControllers, cns,
};
use crate::io::{self, IoCommand};
use crate::log_page::*;
use crate::opcode::nvm;
use crate::pcie::tests as pcie;
use crate::{NSID_ALL, feature};
use std::collections::BTreeSet;
use zerocopy::FromBytes;

/// Status without Do Not Retry, and data.
struct Answer {
    status: Status,
    data: Vec<u8>,
}

trait Subject {
    /// `None`: the command waits.
    fn admin(&mut self, sqe: Sqe, data: &[u8]) -> Option<Answer>;
    /// A frontend's decoding.
    fn io(&self, sqe: &Sqe) -> Result<IoCommand, Status>;
}

const GEOMETRY: NamespaceGeometry = NamespaceGeometry {
    block_bytes: 512,
    block_count: 1 << 20,
    write_protected: false,
};
const MDTS_BYTES: u32 = 512 << 10;

impl Bench {
    /// What the owner of a management controller intercepts.
    fn intercepted(&self, sqe: &Sqe) -> bool {
        let changes = matches!(
            sqe.opcode(),
            admin::NAMESPACE_MANAGEMENT
                | admin::NAMESPACE_ATTACHMENT
                | admin::FIRMWARE_COMMIT
                | admin::FIRMWARE_DOWNLOAD
                | admin::FORMAT_NVM
        );
        let log = sqe.opcode() == admin::GET_LOG_PAGE;
        self.world.addressed.get().is_some() && changes
            || self.world.vendor_commands().contains(&sqe.opcode())
            || log && self.world.vendor_logs().contains(&(sqe.cdw(10) as u8))
    }
}

impl Subject for Bench {
    fn admin(&mut self, sqe: Sqe, data: &[u8]) -> Option<Answer> {
        if self.intercepted(&sqe) {
            return Some(Answer {
                status: Status::SUCCESS,
                data: vec![0; 4096],
            });
        }
        let status = match self.run_with(sqe, data) {
            AdminOutcome::Complete { status, .. } => status.code(),
            AdminOutcome::Reserve { .. } => Status::SUCCESS,
            AdminOutcome::Parked => return None,
        };
        let data = self.out[..4096].to_vec();
        Some(Answer { status, data })
    }
    fn io(&self, sqe: &Sqe) -> Result<IoCommand, Status> {
        match sqe.fuse() {
            _ if self.world.addressed.get().is_some() => {
                io::decode_without_reservations(sqe, 1, &GEOMETRY, MDTS_BYTES)
            }
            0 => io::decode(sqe, 1, &GEOMETRY, MDTS_BYTES),
            _ => io::decode_fused(sqe, 1, &GEOMETRY, MDTS_BYTES),
        }
    }
}

impl Subject for pcie::Bench {
    fn admin(&mut self, sqe: Sqe, data: &[u8]) -> Option<Answer> {
        self.memory.put(pcie::DATA, data);
        let status = pcie::Bench::admin(self, &pcie::with_prps(sqe, pcie::DATA, 0))?;
        Some(Answer {
            status: status.code(),
            data: self.memory.get(pcie::DATA, 4096),
        })
    }
    fn io(&self, sqe: &Sqe) -> Result<IoCommand, Status> {
        io::decode_without_reservations(sqe, 1, &GEOMETRY, MDTS_BYTES)
    }
}

fn function(cntlids: &[u16]) -> Box<dyn Subject> {
    let mut bench = pcie::Bench::ready();
    let all = cntlids.iter().map(|cntlid| SubsystemController {
        cntlid: *cntlid,
        online: true,
    });
    bench.world.controllers = all.collect();
    Box::new(bench)
}

/// `cns`: the CNS values, which no list declares.
struct Case {
    name: &'static str,
    make: fn() -> Box<dyn Subject>,
    cns: &'static [u8],
    has_io: bool,
}

const IO_CNS: &[u8] = &[0, 1, 2, 3, 5, 6, 7, 8, 0x12, 0x13, 0x1C];
const PRIMARY_CNS: &[u8] = &[0, 1, 2, 3, 5, 6, 7, 8, 0x12, 0x13, 0x14, 0x15, 0x1C];

const MANAGED_CNS: &[u8] = &[0, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13];
const MANAGED_PRIMARY_CNS: &[u8] = &[0, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15];

const CASES: [Case; 8] = [
    Case {
        name: "I/O",
        make: || Box::new(Bench::ready()),
        cns: IO_CNS,
        has_io: true,
    },
    Case {
        name: "Discovery",
        make: || Box::new(Bench::discovery()),
        cns: &[1],
        has_io: false,
    },
    Case {
        name: "PCIe, alone",
        make: || function(&[3]),
        cns: PRIMARY_CNS,
        has_io: true,
    },
    Case {
        name: "PCIe, primary",
        make: || function(&[3, 4]),
        cns: PRIMARY_CNS,
        has_io: true,
    },
    Case {
        name: "PCIe, secondary",
        make: || function(&[1, 3]),
        cns: IO_CNS,
        has_io: true,
    },
    // Its export was removed: it may be a secondary.
    Case {
        name: "PCIe, others not known",
        make: || function(&[]),
        cns: IO_CNS,
        has_io: true,
    },
    Case {
        name: "out of band, primary",
        make: || Box::new(Bench::management(0)),
        cns: MANAGED_PRIMARY_CNS,
        has_io: false,
    },
    Case {
        name: "out of band, function",
        make: || Box::new(Bench::management(1)),
        cns: MANAGED_CNS,
        has_io: true,
    },
];

impl Case {
    fn is_managed(&self) -> bool {
        self.name.starts_with("out of band")
    }
    fn answer(&self, sqe: Sqe, data: &[u8]) -> Answer {
        let answer = (self.make)().admin(sqe, data);
        answer.unwrap_or_else(|| panic!("{}: {sqe:?} waits", self.name))
    }
    fn status(&self, sqe: Sqe) -> Status {
        self.answer(sqe, &[0; 512]).status
    }
    fn data(&self, sqe: Sqe) -> Vec<u8> {
        let answer = self.answer(sqe, &[]);
        assert_eq!(answer.status, Status::SUCCESS, "{}: {sqe:?}", self.name);
        answer.data
    }
    /// As 1024 dwords.
    fn log(&self, lid: u8) -> Vec<u32> {
        let page = self.data(get_log(lid, 0, 4096));
        let dwords = page.chunks_exact(4);
        dwords
            .map(|d| u32::from_le_bytes(d.try_into().unwrap()))
            .collect()
    }
    fn identify(&self) -> IdentifyController {
        IdentifyController::read_from_bytes(&self.data(identify(cns::CONTROLLER, 0))).unwrap()
    }
}

macro_rules! same {
    ($case:expr, $a:expr, $b:expr, $($what:tt)+) => {
        assert_eq!($a, $b, "{}: {}", $case.name, format!($($what)+))
    };
}

struct Lists {
    commands: Vec<u32>,
    logs: Vec<u32>,
    features: Vec<u32>,
}

impl Lists {
    fn of(case: &Case) -> Self {
        Self {
            commands: case.log(COMMANDS_SUPPORTED_AND_EFFECTS),
            logs: case.log(SUPPORTED_LOG_PAGES),
            features: case.log(FEATURES_SUPPORTED_AND_EFFECTS),
        }
    }
    fn admin(&self, op: u8) -> bool {
        self.commands[usize::from(op)] & SUPPORTED != 0
    }
    fn io(&self, op: u8) -> bool {
        self.commands[256 + usize::from(op)] & SUPPORTED != 0
    }
    fn log(&self, lid: u8) -> bool {
        self.logs[usize::from(lid)] & SUPPORTED != 0
    }
    fn feature(&self, fid: u8) -> bool {
        self.features[usize::from(fid)] & SUPPORTED != 0
    }
}

#[test]
fn declared_is_answered() {
    for case in &CASES {
        let lists = Lists::of(case);
        admin_commands(case, &lists);
        io_commands(case, &lists);
        log_pages(case, &lists);
        features(case, &lists);
        identify_values(case, &lists);
        identify_bits(case, &lists);
        events(case, &lists);
        resources(case);
    }
}

fn admin_commands(case: &Case, lists: &Lists) {
    let fabrics = matches!(case.name, "I/O" | "Discovery");
    for op in 0..=255u8 {
        // Not in the effects log.
        if fabrics && op == opcode::FABRICS {
            continue;
        }
        let answer = (case.make)().admin(Sqe::new(op, 1), &[0; 512]);
        let known = answer.is_none_or(|answer| answer.status != Status::INVALID_OPCODE);
        same!(case, lists.admin(op), known, "Admin {op:#x}");
        let scopes = (lists.commands[usize::from(op)] >> 20).count_ones();
        same!(case, scopes, u32::from(known), "scope of Admin {op:#x}");
    }
}

fn io_commands(case: &Case, lists: &Lists) {
    let subject = (case.make)();
    for op in 0..=255u8 {
        for (nsid, cdw10) in [(1, 0), (1, u32::MAX), (2, 0), (2, u32::MAX)] {
            let sqe = Sqe::new(op, 1).with_nsid(nsid).with_cdw(10, cdw10);
            let known = subject.io(&sqe) != Err(Status::INVALID_OPCODE.with_dnr());
            same!(case, lists.io(op), case.has_io && known, "I/O {op:#x}");
        }
        let changes = matches!(op, nvm::WRITE | nvm::WRITE_ZEROES | nvm::DATASET_MANAGEMENT);
        let effects = if changes { EFFECT_LBCC } else { 0 };
        let declared = lists.commands[256 + usize::from(op)];
        // Linux warns of other bits.
        let expected = u32::from(lists.io(op)) * (SUPPORTED | effects);
        same!(case, declared, expected, "effects of I/O {op:#x}");
    }
}

fn log_pages(case: &Case, lists: &Lists) {
    for lid in 0..=255u8 {
        let status = case.status(get_log(lid, 0, 512));
        let known = match status {
            Status::SUCCESS => true,
            Status::INVALID_FIELD => false,
            other => panic!("{}: log page {lid:#x}: {other}", case.name),
        };
        same!(case, lists.log(lid), known, "log page {lid:#x}");
    }
    let lpa = case.identify().lpa;
    let per_namespace = case.status(get_log(SMART_HEALTH, 0, 512).with_nsid(1));
    same!(
        case,
        lpa & 1 != 0,
        per_namespace == Status::SUCCESS,
        "LPA 0"
    );
    for (bit, pages) in [
        (1, &[COMMANDS_SUPPORTED_AND_EFFECTS][..]),
        (3, &[0x07, 0x08]),
        (4, &[0x0D]),
        (
            5,
            &[
                SUPPORTED_LOG_PAGES,
                FEATURES_SUPPORTED_AND_EFFECTS,
                MI_COMMANDS_SUPPORTED_AND_EFFECTS,
            ],
        ),
    ] {
        for lid in pages {
            same!(case, lpa & 1 << bit != 0, lists.log(*lid), "LPA {bit}");
        }
    }
    // No Send or Receive, hence no NVMe-MI commands.
    same!(
        case,
        case.log(MI_COMMANDS_SUPPORTED_AND_EFFECTS)
            .iter()
            .any(|d| *d != 0),
        lists.admin(0x1D) || lists.admin(0x1E),
        "NVMe-MI"
    );
}

/// A valid request: NSID if required, and dword 11.
fn sample(opcode: u8, fid: u8) -> Sqe {
    let nsid = u32::from(matches!(
        fid,
        feature::ERROR_RECOVERY
            | feature::RESERVATION_NOTIFICATION_MASK
            | feature::RESERVATION_PERSISTENCE
    ));
    let cdw11 = matches!(
        fid,
        feature::HOST_IDENTIFIER | feature::VOLATILE_WRITE_CACHE
    );
    let sqe = Sqe::new(opcode, 1).with_nsid(nsid).with_cdw(10, fid.into());
    sqe.with_cdw(11, cdw11.into())
}

fn features(case: &Case, lists: &Lists) {
    let selects = case.identify().oncs.get() & 1 << 4 != 0;
    for fid in 0..=255u8 {
        let (get, set) = (
            sample(admin::GET_FEATURES, fid),
            sample(admin::SET_FEATURES, fid),
        );
        for sqe in [get, set] {
            let known = case.status(sqe) != Status::INVALID_FIELD;
            same!(case, lists.feature(fid), known, "feature {fid:#x}");
        }
        if !lists.feature(fid) {
            continue;
        }
        for sel in 1..=7 {
            let status = case.status(get.with_cdw(10, get.cdw(10) | sel << 8));
            same!(
                case,
                selects,
                status == Status::SUCCESS,
                "SEL {sel} of {fid:#x}"
            );
        }
        let saved = case.status(set.with_cdw(10, set.cdw(10) | 1 << 31));
        same!(
            case,
            selects,
            saved != Status::FEATURE_NOT_SAVEABLE,
            "Save of {fid:#x}"
        );

        let scope = lists.features[usize::from(fid)] & !SUPPORTED;
        let refused = |sqe: Sqe, nsid| {
            let status = case.status(sqe.with_nsid(nsid));
            matches!(
                status,
                Status::INVALID_NAMESPACE_OR_FORMAT | Status::INVALID_FIELD
            )
        };
        for nsid in [0, 2, NSID_ALL] {
            let of_namespace = scope == SCOPE_NAMESPACE;
            same!(
                case,
                of_namespace,
                refused(get, nsid),
                "Get {fid:#x} of {nsid:x}"
            );
        }
        if scope == SCOPE_NAMESPACE {
            assert!(
                refused(set, 0) && refused(set, 2),
                "{}: {fid:#x}",
                case.name
            );
        } else {
            assert_eq!(scope, SCOPE_CONTROLLER, "{}: {fid:#x}", case.name);
            let status = case.status(set.with_nsid(1));
            same!(
                case,
                status,
                Status::FEATURE_NOT_NAMESPACE_SPECIFIC,
                "{fid:#x}"
            );
        }
        assert!(!refused(set, NSID_ALL), "{}: {fid:#x}", case.name);
    }
}

fn identify_values(case: &Case, lists: &Lists) {
    for what in 0..=255u8 {
        let mut sqe = identify(what, 1);
        if what == cns::COMMAND_SETS {
            sqe = sqe.with_cdw(10, sqe.cdw(10) | 0xFFFF << 16);
        }
        let known = match case.status(sqe) {
            // An Administrative controller has no namespace.
            Status::SUCCESS | Status::INVALID_NAMESPACE_OR_FORMAT => true,
            Status::INVALID_FIELD => false,
            other => panic!("{}: CNS {what:#x}: {other}", case.name),
        };
        same!(case, case.cns.contains(&what), known, "CNS {what:#x}");
    }
    let manages = lists.admin(admin::VIRTUALIZATION_MANAGEMENT);
    same!(
        case,
        case.identify().oacs.get() & 1 << 7 != 0,
        manages,
        "OACS 7"
    );
    // Optional without that command.
    let lists_them = manages || case.name == "out of band, primary";
    for what in [cns::PRIMARY_CONTROLLER, cns::SECONDARY_CONTROLLERS] {
        same!(case, case.cns.contains(&what), lists_them, "CNS {what:#x}");
    }
    let allocates = lists.admin(admin::NAMESPACE_MANAGEMENT);
    for what in [cns::ALLOCATED_NAMESPACES, cns::ALLOCATED_NAMESPACE] {
        same!(case, case.cns.contains(&what), allocates, "CNS {what:#x}");
    }
}

fn identify_bits(case: &Case, lists: &Lists) {
    let id = case.identify();
    let (oacs, oncs) = (id.oacs.get(), id.oncs.get());
    for (bit, opcodes) in [
        (0, &[0x81, 0x82][..]),
        (1, &[0x80]),
        (2, &[0x10, 0x11]),
        (3, &[0x0D, 0x15]),
        (4, &[0x14]),
        (5, &[0x19, 0x1A]),
        (6, &[0x1D, 0x1E]),
        (7, &[admin::VIRTUALIZATION_MANAGEMENT]),
        (8, &[admin::DOORBELL_BUFFER_CONFIG]),
        (9, &[0x86]),
    ] {
        for op in opcodes {
            same!(case, oacs & 1 << bit != 0, lists.admin(*op), "OACS {bit}");
        }
    }
    for (bit, opcodes) in [
        (0, &[nvm::COMPARE][..]),
        (1, &[nvm::WRITE_UNCORRECTABLE]),
        (2, &[nvm::DATASET_MANAGEMENT]),
        (3, &[nvm::WRITE_ZEROES]),
        (
            5,
            &[
                nvm::RESERVATION_REGISTER,
                nvm::RESERVATION_REPORT,
                nvm::RESERVATION_ACQUIRE,
                nvm::RESERVATION_RELEASE,
            ],
        ),
        (7, &[nvm::VERIFY]),
        (8, &[nvm::COPY]),
    ] {
        for op in opcodes {
            same!(case, oncs & 1 << bit != 0, lists.io(*op), "ONCS {bit}");
        }
    }
    let reserves = oncs & 1 << 5 != 0;
    // Out of band, the page is empty.
    same!(
        case,
        reserves || case.is_managed(),
        lists.log(RESERVATION_NOTIFICATION),
        "log page 80h"
    );
    for fid in [
        feature::RESERVATION_NOTIFICATION_MASK,
        feature::RESERVATION_PERSISTENCE,
    ] {
        same!(case, reserves, lists.feature(fid), "feature {fid:#x}");
    }
    if case.has_io {
        let namespace = case.data(identify(cns::NAMESPACE, 1));
        let namespace = IdentifyNamespace::read_from_bytes(&namespace).unwrap();
        same!(case, reserves, namespace.rescap != 0, "RESCAP");
    }
    let keeps_alive = id.kas.get() != 0;
    same!(case, keeps_alive, lists.admin(admin::KEEP_ALIVE), "KAS");
    same!(
        case,
        keeps_alive,
        lists.feature(feature::KEEP_ALIVE_TIMER),
        "KAS"
    );
    // Discovery controllers know the 128-bit identifier but lack the feature.
    if case.has_io {
        let wide = id.ctratt.get() & 1 != 0;
        same!(
            case,
            wide,
            lists.feature(feature::HOST_IDENTIFIER),
            "CTRATT 0"
        );
    }
    let ana = id.cmic & 1 << 3 != 0;
    same!(case, ana, lists.log(ASYMMETRIC_NAMESPACE_ACCESS), "CMIC 3");
    same!(case, ana, id.anacap != 0, "ANACAP");
    // Out of band, the feature is prohibited.
    let write_cache = lists.feature(feature::VOLATILE_WRITE_CACHE) || case.is_managed();
    same!(case, id.vwc & 1 != 0, write_cache, "VWC 0");
    let subject = (case.make)();
    let flush = Sqe::new(nvm::FLUSH, 1).with_nsid(NSID_ALL);
    // The Administrative controller speaks for the others.
    let of_all = (case.has_io || case.is_managed()) && subject.io(&flush).is_ok();
    same!(case, id.vwc >> 1 == 0b11, of_all, "VWC 2:1");
    let fused = [
        (nvm::COMPARE, io::FUSE_FIRST),
        (nvm::WRITE, io::FUSE_SECOND),
    ]
    .map(|(op, half)| {
        let mut sqe = Sqe::new(op, 1).with_nsid(1);
        sqe.flags |= half;
        subject.io(&sqe).is_ok()
    });
    same!(
        case,
        [id.fuses.get() & 1 != 0; 2],
        fused.map(|f| f && case.has_io),
        "FUSES 0"
    );
}

fn events(case: &Case, lists: &Lists) {
    let id = case.identify();
    let oaes = id.oaes.get();
    if !lists.admin(admin::ASYNC_EVENT_REQUEST) {
        let event = lists.feature(feature::ASYNC_EVENT_CONFIGURATION);
        same!(case, (oaes, id.aerl, event), (0, 0, false), "events");
        return;
    }
    for (bit, lid) in [
        (8, CHANGED_NAMESPACE_LIST),
        (11, ASYMMETRIC_NAMESPACE_ACCESS),
        (31, DISCOVERY),
    ] {
        same!(case, oaes & 1 << bit != 0, lists.log(lid), "OAES {bit}");
    }
    let smart = if lists.log(SMART_HEALTH) { 0x1F } else { 0 };
    for bit in 0..32 {
        let set = set_feature(feature::ASYNC_EVENT_CONFIGURATION, 1 << bit);
        let accepted = case.status(set) == Status::SUCCESS;
        same!(
            case,
            (oaes | smart) & 1 << bit != 0,
            accepted,
            "event {bit}"
        );
    }
    let mut subject = (case.make)();
    for cid in 0..=u16::from(id.aerl) {
        assert!(
            subject.admin(event_request(cid), &[]).is_none(),
            "{}",
            case.name
        );
    }
    let more = subject
        .admin(event_request(99), &[])
        .map(|answer| answer.status);
    same!(
        case,
        more,
        Some(Status::ASYNC_EVENT_REQUEST_LIMIT_EXCEEDED),
        "AERL"
    );
}

/// Primary capabilities against the secondary list.
fn resources(case: &Case) {
    let id = case.identify();
    if !case.cns.contains(&cns::PRIMARY_CONTROLLER) {
        return;
    }
    let primary = case.data(identify(cns::PRIMARY_CONTROLLER, 0));
    let primary = PrimaryController::read_from_bytes(&primary).unwrap();
    let list = case.data(identify(cns::SECONDARY_CONTROLLERS, 0));
    let list = SecondaryControllers::read_from_bytes(&list).unwrap();
    let there = &list.entries[..usize::from(list.count)];
    let assigned = |of: fn(&crate::identify::SecondaryController) -> u16| -> u32 {
        there.iter().map(|entry| u32::from(of(entry))).sum()
    };
    for (resources, assigned) in [
        (primary.vq, assigned(|entry| entry.nvq.get())),
        (primary.vi, assigned(|entry| entry.nvi.get())),
    ] {
        let total = resources.flexible_total.get();
        same!(case, total, assigned, "FRT");
        same!(case, resources.flexible_assigned.get(), assigned, "RFA");
        for part in [resources.secondary_maximum, resources.granularity] {
            assert!(
                u32::from(part.get()) <= total,
                "{}: {resources:?}",
                case.name
            );
        }
        let primary = u32::from(resources.flexible_primary.get());
        assert!(primary + assigned <= total, "{}: {resources:?}", case.name);
    }
    // CMIC bit 2: virtual function.
    let virtual_functions: BTreeSet<u16> = there.iter().map(|entry| entry.vfn.get()).collect();
    let none = virtual_functions.iter().all(|vfn| *vfn == 0);
    same!(case, id.cmic & 1 << 2 == 0, none, "VFN");
}
