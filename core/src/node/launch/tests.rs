//! Threads that are started, fail, wait and stop. A thread that is not woken hangs its test.

use std::sync::atomic::AtomicU64;

use super::*;
use crate::channel::spsc::{self, Consumer, Producer};
use crate::node::{Agent, LaunchMode, plan};

/// What a test sees of an agent.
#[derive(Default)]
struct Seen {
    cycles: AtomicU64,
    stopped: AtomicBool,
    dropped: AtomicBool,
}

/// Runs on deadlines only, and panics in the given cycle.
struct Ticker {
    seen: Arc<Seen>,
    next_ns: u64,
    panic_at: u64,
}

impl Agent for Ticker {
    fn name(&self) -> &str {
        "ticker"
    }

    fn duty_cycle(&mut self, now_ns: u64) -> usize {
        if now_ns < self.next_ns {
            return 0;
        }
        self.next_ns = now_ns + 50_000;
        let cycle = self.seen.cycles.fetch_add(1, Ordering::Relaxed);
        assert!(cycle != self.panic_at, "cycle {cycle} went wrong");
        1
    }

    fn deadline_ns(&self) -> Option<u64> {
        Some(self.next_ns)
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        false
    }

    fn stop(&mut self, _: u64) {
        self.seen.stopped.store(true, Ordering::Relaxed);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.seen.dropped.store(true, Ordering::Relaxed);
    }
}

fn ticker(seen: &Arc<Seen>, panic_at: u64) -> AgentBuilder {
    let seen = seen.clone();
    Box::new(move || Ok(Box::new(Ticker { seen, next_ns: 0, panic_at })))
}

fn thread_plan(name: &str, idle: Idle, agents: Vec<AgentBuilder>) -> ThreadPlan {
    let (parker, _waker) = Parker::new().unwrap();
    let turns = (0..agents.len()).collect();
    ThreadPlan { name: name.to_owned(), core: None, idle, spin_ns: 1000, parker, agents, turns }
}

fn wait_for(condition: impl Fn() -> bool) {
    while !condition() {
        thread::yield_now();
    }
}

#[test]
fn every_idle_strategy_runs_on_deadlines_and_stops() {
    for idle in [Idle::Spin, Idle::Yield, Idle::Park] {
        let (one, two) = (Arc::<Seen>::default(), Arc::<Seen>::default());
        let plans = vec![thread_plan("one", idle, vec![ticker(&one, u64::MAX), ticker(&two, u64::MAX)])];
        let running = launch(plans).unwrap();
        wait_for(|| one.cycles.load(Ordering::Relaxed) > 5 && two.cycles.load(Ordering::Relaxed) > 5);
        assert!(!running.finished() && !one.stopped.load(Ordering::Relaxed));
        assert_eq!(running.stop(), None);
        assert!(one.stopped.load(Ordering::Relaxed) && two.dropped.load(Ordering::Relaxed));
    }
}

#[test]
fn an_agent_that_cannot_be_built_stops_the_launch() {
    let seen = Arc::<Seen>::default();
    let failing: AgentBuilder = Box::new(|| Err("no device eth7".to_owned()));
    let plans = vec![
        thread_plan("good", Idle::Park, vec![ticker(&seen, u64::MAX)]),
        thread_plan("bad", Idle::Park, vec![failing]),
    ];
    let error = launch(plans).unwrap_err();
    assert_eq!(error.to_string(), "cannot set up thread bad: no device eth7");
    assert_eq!(seen.cycles.load(Ordering::Relaxed), 0, "no duty cycle ran");
    assert!(!seen.stopped.load(Ordering::Relaxed), "what never ran is dropped, not stopped");
}

#[test]
fn a_builder_that_panics_stops_the_launch() {
    let failing: AgentBuilder = Box::new(|| panic!("builder went wrong"));
    let error = launch(vec![thread_plan("bad", Idle::Spin, vec![failing])]).unwrap_err();
    assert!(error.to_string().contains("builder went wrong"));
}

#[test]
fn a_panic_is_reported_and_stops_the_others() {
    let (broken, healthy) = (Arc::<Seen>::default(), Arc::<Seen>::default());
    let plans = vec![
        thread_plan("broken", Idle::Park, vec![ticker(&broken, 3)]),
        thread_plan("healthy", Idle::Park, vec![ticker(&healthy, u64::MAX)]),
    ];
    let running = launch(plans).unwrap();
    wait_for(|| running.finished());
    assert_eq!(running.failure().unwrap(), "thread broken panicked: cycle 3 went wrong");
    assert!(healthy.stopped.load(Ordering::Relaxed), "the others end in an orderly way");
    assert!(!broken.stopped.load(Ordering::Relaxed), "the broken one is only dropped");
    assert!(running.stop().is_some());
    assert!(broken.dropped.load(Ordering::Relaxed));
}

#[test]
fn a_thread_is_pinned_and_named() {
    let last = cores().len() - 1;
    let seen = Arc::<Seen>::default();
    let inside = seen.clone();
    let build: AgentBuilder = Box::new(move || {
        let mine = core_affinity::get_core_ids().unwrap();
        assert_eq!(mine, [cores()[last]]);
        assert_eq!(thread::current().name(), Some("pinned"));
        ticker(&inside, u64::MAX)()
    });
    let mut plan = thread_plan("pinned", Idle::Park, vec![build]);
    plan.core = Some(last);
    assert_eq!(launch(vec![plan]).unwrap().stop(), None);
    let mut plan = thread_plan("far", Idle::Park, Vec::new());
    plan.core = Some(100_000);
    assert!(launch(vec![plan]).unwrap_err().to_string().contains("cannot pin thread far to core 100000"));
}

/// Sends a number on when the previous one came back.
struct Player {
    next: u64,
    last: u64,
    out: Producer,
    back: Consumer,
    reached: Arc<AtomicU64>,
}

impl Agent for Player {
    fn name(&self) -> &str {
        "player"
    }

    fn duty_cycle(&mut self, _: u64) -> usize {
        let Some(message) = self.back.peek() else { return 0 };
        let number = u64::from_le_bytes(message.try_into().unwrap());
        self.back.consume();
        assert_eq!(number, self.next);
        self.next += 2;
        self.reached.fetch_max(number, Ordering::Relaxed);
        if number < self.last {
            self.out.push(&[&(number + 1).to_le_bytes()]).unwrap();
            self.out.publish();
        }
        1
    }

    fn deadline_ns(&self) -> Option<u64> {
        None
    }

    fn wait_fds(&self, _: &mut Vec<RawFd>) {}

    fn prepare_wait(&mut self) -> bool {
        !self.back.is_empty()
    }
}

/// Two agents play a long rally with no deadline to help them; shared on one thread, and parked on two.
#[test]
fn parked_agents_wake_each_other_through_queues() {
    const LAST: u64 = 4000;
    for mode in [LaunchMode::Shared, LaunchMode::Dedicated] {
        let placements = plan(mode, 2, cores().len(), Idle::Park, false).unwrap();
        let (mut parkers, wakers): (Vec<_>, Vec<_>) = placements.iter().map(|_| Parker::new().unwrap()).unzip();
        let (mut to_first, from_second) = spsc::channel(4096, wakers[0].clone()).unwrap();
        let (to_second, from_first) = spsc::channel(4096, wakers[wakers.len() - 1].clone()).unwrap();
        let reached = Arc::new(AtomicU64::new(0));
        to_first.push(&[&0u64.to_le_bytes()]).unwrap();
        to_first.publish();
        let player = |next, out, back| -> AgentBuilder {
            let reached = reached.clone();
            Box::new(move || Ok(Box::new(Player { next, last: LAST, out, back, reached })))
        };
        let mut players = vec![player(0, to_second, from_second), player(1, to_first, from_first)];
        let plans = placements.into_iter().rev().map(|placement| ThreadPlan {
            name: format!("player-{}", placement.agents.start),
            core: placement.core,
            idle: Idle::Park,
            spin_ns: 0,
            parker: parkers.pop().unwrap(),
            agents: players.split_off(placement.agents.start),
            turns: (0..placement.agents.len()).collect(),
        });
        let running = launch(plans.collect()).unwrap();
        wait_for(|| running.finished() || reached.load(Ordering::Relaxed) == LAST);
        assert_eq!(running.stop(), None);
    }
}
