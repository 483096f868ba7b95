//! `forebay status`, `forebay stats`, `forebay upgrade` and `forebay shutdown`.

use std::time::Duration;

use forebay_control::model::events::TakeoverStats;
use forebay_control::model::stats::{EngineStats, LaneStats, OpStats, PoolStats, Stats};
use forebay_control::model::{Capacity, DeathReport, Done, Health, Status};
use forebay_device::size::format_bytes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::context::Context;
use crate::failure::{Failure, Outcome, While};
use crate::output::{latency, pairs, table};
use crate::word::word;

const CHECK_LIMIT: Duration = Duration::from_secs(5);

pub(crate) fn status(context: &Context) -> Outcome {
    let status: Status = context.client.get("/v1/status")?;
    context.output.show(&status, status_text)
}

/// Reports health by the exit status. A missing answer has one code for all reasons.
pub(crate) fn check(context: Outcome<Context>) -> Outcome {
    let asked = context.and_then(|context| {
        let client = context.client.with_time_limit(CHECK_LIMIT);
        let status: Status = client.get("/v1/status")?;
        context.output.show(&status, status_text)?;
        Ok(status.health)
    });
    match asked.map_err(Failure::unreachable)? {
        Health::Well => Ok(()),
        Health::Warning => Err(Failure::unwell(1)),
        Health::Trouble => Err(Failure::unwell(2)),
    }
}

/// Engine and daemon commit everything at their end.
const SHUTDOWN_LIMIT: Timespec = Timespec {
    tv_sec: 60,
    tv_nsec: 0,
};

pub(crate) fn shutdown(context: &Context) -> Outcome {
    let status: Status = context.client.get("/v1/status")?;
    let pid = i32::try_from(status.daemon_pid)
        .ok()
        .and_then(Pid::from_raw);
    let daemon = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let daemon = daemon.ok_or_else(|| Failure::new("the daemon has no process id"))?;
    let daemon = daemon.while_doing("watch the daemon")?;
    let _: Done = context.client.post("/v1/shutdown", &())?;
    let mut ended = [PollFd::new(&daemon, PollFlags::IN)];
    if poll(&mut ended, Some(&SHUTDOWN_LIMIT)).while_doing("wait for the daemon to exit")? == 0 {
        let reported = format!("the daemon (pid {}) has not exited yet", status.daemon_pid);
        return Err(Failure::new(reported).hint("its log shows what it is waiting for"));
    }
    context.output.done(&Done {
        done: "the engine and the daemon have exited".to_owned(),
    })
}

pub(crate) fn upgrade(context: &Context) -> Outcome {
    let done: Done = context.client.post("/v1/engine/replace", &())?;
    context.output.done(&done)
}

fn status_text(status: &Status) -> String {
    let engine = match status.engine_pid {
        Some(pid) => format!(
            "{}, pid {pid}, generation {}",
            word(&status.engine_state),
            status.generation
        ),
        None => word(&status.engine_state),
    };
    let pool = match (&status.pool, &status.pool_trouble) {
        (Some(pool), _) => pool.clone(),
        (None, Some(trouble)) => format!("not open: {}", trouble.message),
        (None, None) => "none (see `forebay pool create`)".into(),
    };
    let capacity = status.capacity.as_ref().map(capacity_text);
    let limits = status.limits.iter();
    let limits: Vec<String> = limits
        .map(|limit| format!("{} of {} {}", limit.used, limit.most, limit.what))
        .collect();
    let listeners = match status.nvme_tcp.is_empty() {
        true => "none".to_owned(),
        false => status.nvme_tcp.join(", "),
    };
    let mut rows = vec![
        ("health", word(&status.health)),
        (
            "daemon",
            format!(
                "running, pid {}, up {} s",
                status.daemon_pid, status.uptime_s
            ),
        ),
        ("engine", engine),
        ("version", version_text(status)),
        ("pool", pool),
    ];
    rows.extend(capacity.map(|capacity| ("capacity", capacity)));
    rows.push(("nvme/tcp", listeners));
    if !limits.is_empty() {
        rows.push(("in use", limits.join(", ")));
    }
    rows.push(("state", status.state_dir.clone()));
    let mut text = pairs(rows);
    if let Some(hint) = status.pool_trouble.as_ref().and_then(|t| t.hint.as_ref()) {
        text.push_str(&format!("hint: {hint}\n"));
    }
    if let Some(death) = &status.last_death {
        text.push_str(&death_text(death));
    }
    for warning in &status.warnings {
        text.push_str(&format!("warning: {warning}\n"));
    }
    text
}

fn version_text(status: &Status) -> String {
    match &status.engine_version {
        Some(engine) if *engine != status.version => {
            format!("{}, engine {engine}", status.version)
        }
        _ => status.version.clone(),
    }
}

fn capacity_text(capacity: &Capacity) -> String {
    let promised = match capacity.promised_bytes {
        0 => String::new(),
        promised => format!(", {} promised", format_bytes(promised)),
    };
    format!(
        "{} of {} used{promised}, {} free",
        format_bytes(capacity.used_bytes),
        format_bytes(capacity.total_bytes),
        format_bytes(capacity.free_bytes)
    )
}

fn death_text(death: &DeathReport) -> String {
    let mut text = format!(
        "last death: {} pid {} of generation {}, {}",
        word(&death.process),
        death.pid,
        death.generation,
        death.cause
    );
    if let Some(commands) = death.commands_in_flight {
        text.push_str(&format!(", with {commands} commands in flight"));
    }
    text.push('\n');
    if let Some(path) = &death.report_path {
        text.push_str(&format!("  report: {path}\n"));
    }
    text
}

pub(crate) fn stats(context: &Context) -> Outcome {
    let stats: Stats = context.client.get("/v1/stats")?;
    context.output.show(&stats, stats_text)
}

fn stats_text(stats: &Stats) -> String {
    let mut text = String::new();
    if let Some(engine) = &stats.engine {
        text.push_str(&engine_text(engine));
    }
    if let Some(pool) = &stats.pool {
        text.push_str(&pool_text(pool));
    }
    text.push_str(&takeover_text(&stats.takeover));
    text.push('\n');
    text.push_str(&lanes_text(&stats.lanes));
    text
}

fn engine_text(engine: &EngineStats) -> String {
    let total = engine.asleep_ns.saturating_add(engine.busy_ns);
    let asleep = engine.asleep_ns as f64 * 100.0 / total.max(1) as f64;
    format!(
        "engine pid {}: {} reactors, {asleep:.1} % asleep, CPU {:.2} s user {:.2} s system, {}\n",
        engine.pid,
        engine.reactors,
        engine.cpu_user_s,
        engine.cpu_system_s,
        format_bytes(engine.resident_bytes)
    )
}

fn pool_text(pool: &PoolStats) -> String {
    format!(
        "pool: {} of {} clean, {} owned, {} reserved, {} dirty; {} grants, {} faults, {} revokes, \
         {} commits\n",
        format_bytes(pool.clean_bytes),
        format_bytes(pool.capacity_bytes),
        format_bytes(pool.owned_bytes),
        format_bytes(pool.reserved_bytes),
        format_bytes(pool.dirty_bytes),
        pool.grants,
        pool.faults,
        pool.revokes,
        pool.catalog_commits
    )
}

fn takeover_text(takeover: &TakeoverStats) -> String {
    if takeover.takeovers == 0 {
        return String::new();
    }
    let mut text = format!(
        "take-overs: {}, the last pause {}",
        takeover.takeovers,
        latency(takeover.last_pause_ns)
    );
    for fence in &takeover.last_fences {
        let after = latency(Some(fence.fence_ns));
        text.push_str(&format!("; device {} free after {after}", fence.device));
    }
    for closed in &takeover.connections_closed {
        text.push_str(&format!(
            "; {} connections closed: {}",
            closed.count, closed.reason
        ));
    }
    text + "\n"
}

fn lanes_text(lanes: &[LaneStats]) -> String {
    let mut rows = Vec::new();
    for lane in lanes {
        let classes = [
            ("read", &lane.read),
            ("write", &lane.write),
            ("flush", &lane.flush),
            ("deallocate", &lane.deallocate),
        ];
        for (index, (class, ops)) in classes.into_iter().enumerate() {
            rows.push(lane_row(lane, index == 0, class, ops));
        }
    }
    table(
        [
            "EXPORT",
            "OP",
            ">COUNT",
            ">BYTES",
            ">P50",
            ">P99",
            ">ERRORS",
            ">IN FLIGHT",
            ">QUEUES",
        ],
        rows,
    )
}

fn lane_row(lane: &LaneStats, first: bool, class: &str, ops: &OpStats) -> [String; 9] {
    let once = |text: String| if first { text } else { String::new() };
    [
        once(format!("{}/{}", lane.tenant, lane.volume)),
        class.to_owned(),
        ops.ops.to_string(),
        format_bytes(ops.bytes),
        latency(ops.latency_p50_ns),
        latency(ops.latency_p99_ns),
        ops.errors.to_string(),
        once(lane.in_flight.to_string()),
        once(lane.queues.to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(pool: serde_json::Value) -> String {
        let mut status = serde_json::json!({
            "daemon_pid": 7, "generation": 1, "version": "1", "engine_state": "stopped",
            "uptime_s": 1, "nvme_tcp": [], "state_dir": "/s", "warnings": []
        });
        let (all, more) = (status.as_object_mut(), pool.as_object().cloned());
        all.unwrap().extend(more.unwrap());
        status_text(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn no_row_is_empty() {
        let none = text(serde_json::json!({}));
        assert!(none.lines().all(|row| row.split_whitespace().count() > 1));
        assert!(!none.contains("in use") && !none.contains("capacity"));
        let capacity = serde_json::json!({
            "total_bytes": 100, "used_bytes": 0, "promised_bytes": 81, "free_bytes": 19
        });
        let limit = serde_json::json!({"what": "exports", "used": 1, "most": 2});
        let some = text(serde_json::json!({"pool": "p", "capacity": capacity, "limits": [limit]}));
        assert!(some.contains("0 B of 100 B used, 81 B promised, 19 B free"));
        assert!(some.contains("1 of 2 exports"));
        let other = text(serde_json::json!({"engine_version": "2"}));
        assert!(other.contains("1, engine 2"), "{other}");
        let same = text(serde_json::json!({"engine_version": "1"}));
        assert!(!same.contains("1, engine"), "{same}");
    }
}
