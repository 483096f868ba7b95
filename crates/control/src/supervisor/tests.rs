//! Tests of the supervisor with shell scripts as engines.

use super::*;
use crate::devices;
use crate::firmware::Firmware;
use crate::firmware::tests::{firmware_of, install};
use crate::owner::{Grants, Limits};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use tokio::time::sleep;

fn with_engine<F: Future<Output = ()>>(
    script: &str,
    test: impl FnOnce(Rc<Supervisor>, Rc<Owner>, PathBuf) -> F,
) {
    with_engines(script, None, test);
}

/// `image` is the script in firmware slot 2.
fn with_engines<F: Future<Output = ()>>(
    script: &str,
    image: Option<&str>,
    test: impl FnOnce(Rc<Supervisor>, Rc<Owner>, PathBuf) -> F,
) {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let program = at.join("engine.sh");
    std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let config = EngineConfig {
        program,
        reactors: 1,
        cpus: Vec::new(),
        stuck_after: Duration::ZERO,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(tokio::task::LocalSet::new().run_until(async {
        let open = devices::create(&crate::model::PoolCreate {
            create: true,
            name: "pool".to_owned(),
            devices: vec![format!("file:{}", at.join("pool.img").display())],
            size_bytes: Some(64 << 20),
            ..crate::model::PoolCreate::default()
        })
        .unwrap();
        let grants = Grants::fresh(&at.join("grants"), &open.pool, &[1; 16], 256).unwrap();
        let owner = Owner::new(
            open.pool,
            Arc::new(open.catalog),
            open.devices,
            grants,
            Limits::default(),
            Rc::default(),
            Rc::default(),
        );
        let firmware = firmware_of(at, config.program.clone());
        if let Some(image) = image {
            let program = format!("#!/bin/sh\n{image}\n").into_bytes();
            install(&firmware, program).await;
        }
        let supervisor = Supervisor::new(config, firmware, at, at, None, Rc::default());
        tokio::task::spawn_local(supervisor.clone().run(owner.clone(), None));
        let test = test(supervisor, owner, at.to_owned());
        timeout(Duration::from_secs(300), test)
            .await
            .expect("the test hangs");
    }));
}

#[test]
fn an_engine_that_dies_at_once_is_started_again_and_reported() {
    with_engine(
        "echo no such thing; exit 3",
        |supervisor, owner, folder| async move {
            let third = || {
                let view = supervisor.view();
                (view.generation >= 3 && view.last_death.is_some()).then_some(view)
            };
            let view = loop {
                match third() {
                    Some(view) => break view,
                    None => sleep(Duration::from_millis(5)).await,
                }
            };
            assert_ne!(view.state, EngineState::Running);
            let death = view.last_death.unwrap();
            assert_eq!(death.cause, "exit code 3");
            let report = std::fs::read_to_string(death.report_path.unwrap()).unwrap();
            assert!(report.contains("exit code 3"), "{report}");
            let trouble = view.trouble.unwrap();
            assert!(trouble.contains("exit code 3"), "{trouble}");
            assert!(trouble.contains("engine.log: no such thing"), "{trouble}");
            let durable = owner.base.core.borrow().pool.info().engine_generation;
            assert!(durable >= 3);
            // It is in the delay before the next start; the stop does not wait for that.
            supervisor.stop(&owner, Duration::from_secs(30)).await;
            assert_eq!(supervisor.view().state, EngineState::Stopped);
            assert!(process::recorded(&folder).unwrap().is_some());
        },
    );
}

#[test]
fn an_engine_that_does_not_answer_is_killed_by_a_stop() {
    with_engine("exec sleep 1000", |supervisor, owner, _| async move {
        let pid = loop {
            match supervisor.view().pid {
                Some(pid) => break pid,
                None => sleep(Duration::from_millis(5)).await,
            }
        };
        supervisor.stop(&owner, Duration::from_secs(30)).await;
        assert_eq!(supervisor.view().pid, None);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    });
}

#[test]
fn an_image_whose_engine_dies_at_once_is_left_for_the_installed_program() {
    let test = |supervisor: Rc<Supervisor>, owner: Rc<Owner>, _| async move {
        let view = loop {
            let view = supervisor.view();
            match view.generation >= 2 && view.pid.is_some() {
                true => break view,
                false => sleep(Duration::from_millis(5)).await,
            }
        };
        assert_eq!((view.slot, view.generation), (Slot::Installed, 2));
        let left = supervisor.firmware.fell_back().unwrap();
        assert!(left.why.contains("exit code 4"), "{left:?}");
        let kinds = supervisor.events.all();
        assert!(
            kinds
                .iter()
                .any(|event| event.kind == EventKind::EngineDied)
        );
        supervisor.stop(&owner, Duration::from_secs(30)).await;
    };
    with_engines("exec sleep 1000", Some("exit 4"), test);
}

fn verdict(crashed: bool) -> Verdict {
    Verdict {
        cause: "a test".to_owned(),
        crashed,
        blamed: None,
        export: None,
    }
}

fn idle() -> (Rc<Supervisor>, Rc<Events>) {
    let at = Path::new("/nowhere");
    let config = EngineConfig {
        program: at.join("none"),
        reactors: 1,
        cpus: Vec::new(),
        stuck_after: Duration::ZERO,
    };
    let events = Rc::new(Events::default());
    let firmware = Firmware::new(at, config.program.clone(), Vec::new(), Rc::default());
    let supervisor = Supervisor::new(config, firmware, at, at, None, events.clone());
    (supervisor, events)
}

fn assert_dropped(supervisor: &Supervisor, events: &Events) {
    assert!(supervisor.estate.borrow().is_none());
    let kinds: Vec<EventKind> = events.all().iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::NotTakenOver]);
}

/// How many successors die over one estate before it is dropped.
fn deaths_over_an_estate(crashed: bool) -> u32 {
    let (supervisor, events) = idle();
    *supervisor.estate.borrow_mut() = Some(Estate::empty(1));
    // Deaths of engines that were not given the estate don't count.
    for _ in 0..10 {
        supervisor.keep_estate(None, &verdict(true));
        assert!(supervisor.estate.borrow().is_some());
    }
    for deaths in 1.. {
        supervisor.estate.borrow_mut().as_mut().unwrap().tries += 1;
        supervisor.keep_estate(None, &verdict(crashed));
        if supervisor.estate.borrow().is_none() {
            assert_dropped(&supervisor, &events);
            return deaths;
        }
    }
    unreachable!()
}

#[test]
fn an_estate_that_kills_is_dropped() {
    assert_eq!(
        deaths_over_an_estate(true),
        estate_limit::CRASHES_OVER_ESTATE
    );
    assert_eq!(
        deaths_over_an_estate(false),
        estate_limit::DEATHS_OVER_ESTATE
    );
}

#[test]
fn an_estate_that_keeps_crashing_successors_is_dropped() {
    let (supervisor, events) = idle();
    let die = |generation, verdict: Verdict, young| {
        supervisor.keep_left(Some(Estate::empty(generation)), &verdict, young);
        supervisor.line.converted();
        supervisor.estate.take().is_some()
    };
    let of_an_export = || Verdict {
        export: Some(forebay_pool::ExportId(1)),
        ..verdict(true)
    };
    // Killed, old, or at fault of an export: none of these counts.
    for generation in 0..20 {
        assert!(die(generation, verdict(false), true));
        assert!(die(generation, verdict(true), false));
        assert!(die(generation, of_an_export(), true));
    }
    for generation in 1..estate_limit::YOUNG_CRASHES {
        assert!(die(generation.into(), verdict(true), true));
    }
    assert!(!die(100, verdict(true), true));
    assert_dropped(&supervisor, &events);
    assert!(die(101, verdict(true), true));
}

#[test]
fn an_estate_with_which_no_engine_starts_is_dropped() {
    let (supervisor, events) = idle();
    for _ in 0..10 {
        supervisor.start_failed();
    }
    *supervisor.estate.borrow_mut() = Some(Estate::empty(1));
    for _ in 1..estate_limit::FAILED_STARTS {
        supervisor.start_failed();
    }
    supervisor.line.started();
    for _ in 1..estate_limit::FAILED_STARTS {
        supervisor.start_failed();
        assert!(supervisor.estate.borrow().is_some());
    }
    supervisor.start_failed();
    assert_dropped(&supervisor, &events);
}
