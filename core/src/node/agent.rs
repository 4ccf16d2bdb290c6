//! An agent: a part of a node that does a bounded piece of work whenever its duty cycle is called.
//!
//! Agents know nothing of threads. The same agent runs on a pinned thread of its own, shares one thread with all others,
//! or is stepped by the simulator ([`Invoked`]).

use std::os::fd::RawFd;

/// What a thread, or the simulator, drives.
pub trait Agent {
    /// For thread names, counters and error messages.
    fn name(&self) -> &str;

    /// Does what can be done at `now_ns` without blocking, a bounded amount of it, and returns how much that was: 0 lets
    /// the thread idle.
    fn duty_cycle(&mut self, now_ns: u64) -> usize;

    /// When `duty_cycle` must run even if nothing arrives; `None`: only when something arrives.
    fn deadline_ns(&self) -> Option<u64>;

    /// Appends the descriptors that become readable when something arrives for this agent.
    fn wait_fds(&self, fds: &mut Vec<RawFd>);

    /// Called right before the thread may block: true when work waits already. It must look at everything that a
    /// [`Waker`](super::Waker) announces, for that is what makes parking safe.
    fn prepare_wait(&mut self) -> bool;

    /// The last call, when the node is stopped in an orderly way.
    fn stop(&mut self, _now_ns: u64) {}
}

/// Why an agent has left: what a thread unwinds with.
#[derive(Debug)]
pub struct Left(pub String);

/// Ends the node because an agent cannot go on, for a reason outside of the program that an operator reads in one line. What
/// it shares with others cannot be trusted any more, as after a panic, so the thread unwinds like one.
pub fn leave(why: String) -> ! {
    std::panic::resume_unwind(Box::new(Left(why)))
}

/// Makes an agent on the thread that will run it: transports cannot move between threads. An error says what was tried and
/// what to do about it.
pub type AgentBuilder = Box<dyn FnOnce() -> Result<Box<dyn Agent>, String> + Send>;

/// Agents that are driven together: by a thread of the launcher, or by a caller that wants to decide when (launch mode
/// `invoked`).
#[derive(Default)]
pub struct Invoked {
    agents: Vec<Box<dyn Agent>>,
    /// Whose duty cycle is called, one after the other: places in `agents`, some more than once.
    turns: Vec<usize>,
}

impl Invoked {
    /// Builds all agents, on the calling thread. Each has one turn in a step, in this order.
    ///
    /// # Errors
    /// The first builder's error; agents built before it are dropped.
    pub fn build(builders: Vec<AgentBuilder>) -> Result<Invoked, String> {
        let turns = (0..builders.len()).collect();
        Invoked::build_in_turns(builders, turns)
    }

    /// As [`build`](Self::build), with the turns of a step: numbers of builders. One may have several turns, so that what an
    /// agent in between brings it is taken in the same step; every one has at least one, or this panics.
    ///
    /// # Errors
    /// As `build`.
    pub fn build_in_turns(builders: Vec<AgentBuilder>, turns: Vec<usize>) -> Result<Invoked, String> {
        assert!((0..builders.len()).all(|agent| turns.contains(&agent)), "an agent without a turn: {turns:?}");
        assert!(turns.iter().all(|turn| *turn < builders.len()), "a turn without an agent: {turns:?}");
        let agents = builders.into_iter().map(|build| build()).collect::<Result<_, _>>()?;
        Ok(Invoked { agents, turns })
    }

    /// The agents, in the order in which they were built.
    pub fn agents(&self) -> &[Box<dyn Agent>] {
        &self.agents
    }

    /// All turns once; returns the work done.
    #[inline]
    pub fn step(&mut self, now_ns: u64) -> usize {
        self.turns.iter().map(|turn| self.agents[*turn].duty_cycle(now_ns)).sum()
    }

    /// The earliest deadline of all agents.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.agents.iter().filter_map(|agent| agent.deadline_ns()).min()
    }

    /// Appends the descriptors that any agent waits for.
    pub fn wait_fds(&self, fds: &mut Vec<RawFd>) {
        for agent in &self.agents {
            agent.wait_fds(fds);
        }
    }

    /// True when work waits for any agent already.
    pub fn prepare_wait(&mut self) -> bool {
        self.agents.iter_mut().any(|agent| agent.prepare_wait())
    }

    /// Stops every agent, in order.
    pub fn stop(&mut self, now_ns: u64) {
        for agent in &mut self.agents {
            agent.stop(now_ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    struct Fixed {
        work: usize,
        deadline: Option<u64>,
        waits: bool,
        log: Rc<RefCell<Vec<(usize, u64)>>>,
    }

    impl Agent for Fixed {
        fn name(&self) -> &str {
            "fixed"
        }

        fn duty_cycle(&mut self, now_ns: u64) -> usize {
            self.log.borrow_mut().push((self.work, now_ns));
            self.work
        }

        fn deadline_ns(&self) -> Option<u64> {
            self.deadline
        }

        fn wait_fds(&self, fds: &mut Vec<RawFd>) {
            fds.push(self.work as RawFd);
        }

        fn prepare_wait(&mut self) -> bool {
            self.waits
        }
    }

    #[test]
    fn a_group_steps_in_order_and_sums_up() {
        let log = Rc::default();
        let agent = |work, deadline, waits| Fixed { work, deadline, waits, log: Rc::clone(&log) };
        let mut group = Invoked {
            agents: vec![
                Box::new(agent(1, Some(9), false)),
                Box::new(agent(2, None, true)),
                Box::new(agent(4, Some(5), false)),
            ],
            turns: vec![0, 1, 2],
        };
        assert_eq!(group.step(33), 7);
        assert_eq!(*log.borrow(), [(1, 33), (2, 33), (4, 33)]);
        assert_eq!((group.deadline_ns(), group.prepare_wait()), (Some(5), true));
        let mut fds = vec![0];
        group.wait_fds(&mut fds);
        assert_eq!(fds, [0, 1, 2, 4]);
        group.turns = vec![1, 0, 1, 2];
        assert_eq!(group.step(34), 9);
        assert_eq!(log.borrow()[3..], [(2, 34), (1, 34), (2, 34), (4, 34)]);
        group.stop(35);
    }

    #[test]
    #[should_panic(expected = "without a turn")]
    fn every_agent_has_a_turn() {
        let _ = Invoked::build_in_turns(vec![Box::new(|| Err(String::new()))], Vec::new());
    }

    #[test]
    fn an_empty_group_never_has_to_run() {
        let mut group = Invoked::build(Vec::new()).unwrap();
        assert_eq!((group.step(1), group.deadline_ns(), group.prepare_wait()), (0, None, false));
        assert!(
            Invoked::build(vec![Box::new(|| Err("no device".to_owned()))]).is_err_and(|error| error == "no device")
        );
    }
}
