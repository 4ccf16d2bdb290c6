//! Writers and consumer in one loop, on the caller's thread, for a given time: one run of one client.
//!
//! One thread keeps the measurement itself from competing for cores with what it measures, and gives writers and consumer
//! one clock. The clock is read at every send and every event, not once a turn: a turn that handles a hundred records takes
//! longer than what is measured.

use antelog_core::client::{Record, SessionHandler, Slot, SubscriptionId};
use antelog_protocol::client::{Event, Scope};
use antelog_protocol::{Position, Refusal, ShardId};

use crate::consumer::{Consumer, ConsumerConfig};
use crate::counted::Counted;
use crate::hog::{Hog, HogConfig};
use crate::load::{Load, LoadConfig, Stamp};
use crate::log::{Clock, Host, Log};
use crate::stats::Measured;

/// Why a run ended that the user interrupted.
const INTERRUPTED: &str = "interrupted";

/// One run.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// What the writers send.
    pub load: LoadConfig,
    /// What each consumer computes.
    pub consumer: ConsumerConfig,
    /// One consumer of all shards merged in position order, instead of one consumer for each shard.
    pub merged: bool,
    /// Another program that wants a core, for as long as the run takes.
    pub hog: Option<HogConfig>,
    /// Where to subscribe: the log's tail, or its beginning when nobody has written yet.
    pub from: Position,
    /// Records intended during the first so many nanoseconds are sent and not measured.
    pub warm_up_ns: u64,
    /// Records are intended for so many nanoseconds after the warm-up.
    pub measure_ns: u64,
    /// How many nanoseconds after that what is outstanding may take to finish.
    pub drain_ns: u64,
    /// Stamped on the records, so that those of other runs and clients are told apart.
    pub tag: u64,
}

/// What a run gave.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// Latencies and totals.
    pub measured: Measured,
    /// What the cluster counted between the end of the warm-up and the end of the load.
    pub counted: Counted,
    /// What it counted before that.
    pub counted_before: Counted,
}

/// Takes what the log tells and passes it to writers and consumer with the time.
struct Recorder<C> {
    clock: C,
    load: Load,
    consumers: Vec<(SubscriptionId, Consumer)>,
    measured: Measured,
    trimmed: Option<Position>,
}

impl<C: Clock> SessionHandler for Recorder<C> {
    fn on_acknowledged(&mut self, shard: ShardId, seq: u64, _position: Position) {
        let Some(stamp) = self.load.settle(shard, seq) else { return };
        let now_ns = self.clock.now_ns();
        self.measured.totals.acknowledged += 1;
        if self.measured.covers(stamp.intended_ns) {
            self.measured.append.record_between(stamp.intended_ns, now_ns);
            self.measured.append_service.record_between(stamp.sent_ns, now_ns);
        }
    }

    fn on_refused(&mut self, shard: ShardId, seq: u64, refusal: Refusal) {
        let Some(stamp) = self.load.settle(shard, seq) else { return };
        match elsewhere(&refusal) {
            Some(other) if self.load.move_to(other, stamp) => self.measured.totals.moved += 1,
            _ => self.measured.totals.refused += 1,
        }
    }

    fn on_unknown(&mut self, shard: ShardId, seq: u64) {
        if self.load.settle(shard, seq).is_some() {
            self.measured.totals.refused += 1;
        }
    }

    fn on_event(&mut self, subscription: SubscriptionId, event: Event<Record>) {
        let now_ns = self.clock.now_ns();
        let Some((_, consumer)) = self.consumers.iter_mut().find(|(id, _)| *id == subscription) else { return };
        match event {
            Event::Deliver { position, record, speculative, .. } => {
                match Stamp::of(&record).filter(|stamp| stamp.tag == self.load.tag()) {
                    Some(stamp) => {
                        consumer.on_deliver(now_ns, position, stamp, speculative, &mut self.measured);
                    }
                    None => self.measured.totals.foreign += 1,
                }
            }
            Event::Confirm { upto } => consumer.on_confirm(now_ns, upto, &mut self.measured),
            Event::Fail { from } => consumer.on_fail(from, &mut self.measured),
            // Its shard is lost; what is measured goes on with the others.
            Event::Unavailable { .. } => {}
        }
    }

    fn on_trimmed(&mut self, _subscription: SubscriptionId, head: Position) {
        self.trimmed = Some(head);
    }

    fn on_read(&mut self, _token: u64, _position: Position, _slot: Slot) {}

    fn on_tail(&mut self, _token: u64, _position: Position) {}

    fn on_connection(&mut self, _address: &str, error: Option<&str>) {
        self.measured.totals.disconnects += u64::from(error.is_some());
    }
}

impl<C: Clock> Recorder<C> {
    /// All that was sent is acknowledged, and the outputs of all that was acknowledged are released.
    fn is_settled(&self) -> bool {
        self.load.next_ns().is_none()
            && self.load.outstanding() == 0
            && self.consumers.iter().map(|(_, c)| c.released()).sum::<u64>() >= self.measured.totals.acknowledged
    }

    fn next_ns(&self, end_ns: u64) -> u64 {
        let consumers = self.consumers.iter().filter_map(|(_, c)| c.next_ns());
        consumers.chain(self.load.next_ns()).min().unwrap_or(end_ns).min(end_ns)
    }

    fn finish(mut self) -> Measured {
        let unsent = self.load.abandon();
        let totals = &mut self.measured.totals;
        totals.sent = self.load.sent();
        totals.pushed_back = self.load.pushed_back();
        let unreleased = totals.acknowledged.saturating_sub(totals.released);
        totals.unfinished = unsent + self.load.outstanding() + unreleased;
        self.measured
    }
}

/// The shard that a refusal sends its writer to; `None` when the record is refused for good.
fn elsewhere(refusal: &Refusal) -> Option<ShardId> {
    // Every refusal is named, so that one that knows another shard cannot be overlooked here.
    match refusal {
        Refusal::Closed { instead } => Some(*instead),
        Refusal::Gap { .. }
        | Refusal::UnknownSession
        | Refusal::Forgotten
        | Refusal::TooLarge { .. }
        | Refusal::RegionFull { .. }
        | Refusal::DiskFull
        | Refusal::NotHere
        | Refusal::OldView { .. }
        | Refusal::Failed
        | Refusal::Forbidden => None,
    }
}

/// Runs writers and consumer until the load is over and what it sent is finished, or the time for that has passed; see
/// [`unfinished`](crate::stats::Totals::unfinished). The log should be connected: records that fall due before it is count
/// from their intended times.
///
/// # Errors
/// When the configuration makes no sense or the log gives up.
pub fn drive<L: Log, C: Clock + Clone, H: Host>(
    log: &mut L,
    clock: &C,
    host: &mut H,
    config: &RunConfig,
) -> Result<Outcome, String> {
    let _hog = config.hog.map(Hog::start).transpose()?;
    let start_ns = clock.now_ns();
    let measure_from_ns = start_ns + config.warm_up_ns;
    let load_end_ns = measure_from_ns + config.measure_ns;
    let mut recorder = Recorder {
        clock: clock.clone(),
        load: Load::new(&config.load, config.tag, start_ns, load_end_ns)?,
        consumers: subscribe(log, config)?,
        measured: Measured::new(measure_from_ns),
        trimmed: None,
    };
    let (mut warm, mut counted) = (None, None);
    // One end after the other: of the warm-up, of the load, of the time to drain.
    loop {
        let mut work = recorder.load.send(log, clock)?;
        let now_ns = clock.now_ns();
        work += log.poll(now_ns, &mut recorder);
        let now_ns = clock.now_ns();
        let Recorder { consumers, measured, .. } = &mut recorder;
        for (_, consumer) in consumers {
            work += consumer.on_cycle(now_ns, clock, measured);
        }
        if let Some(head) = recorder.trimmed {
            return Err(format!("the log begins at position {head}: the subscription from {} ended", config.from));
        }
        if host.interrupted() {
            return Err(INTERRUPTED.to_owned());
        }
        let mut end_ns = measure_from_ns;
        if now_ns >= measure_from_ns {
            warm.get_or_insert_with(|| host.counted());
            end_ns = load_end_ns;
        }
        if now_ns >= load_end_ns {
            counted.get_or_insert_with(|| host.counted());
            end_ns = load_end_ns + config.drain_ns;
            if recorder.is_settled() || now_ns >= end_ns {
                break;
            }
        }
        host.idle(work, recorder.next_ns(end_ns));
    }
    let counted_before = warm.unwrap_or_default();
    let counted = counted.unwrap_or_default().since(&counted_before);
    Ok(Outcome { measured: recorder.finish(), counted, counted_before })
}

fn subscribe(log: &mut impl Log, config: &RunConfig) -> Result<Vec<(SubscriptionId, Consumer)>, String> {
    let scopes: Vec<Scope> = match config.merged {
        true => vec![Scope::All],
        false => config.load.writers.iter().map(|writer| Scope::Shard(writer.shard)).collect(),
    };
    let consumer = |scope| Ok((log.subscribe(scope, config.from), Consumer::new(&config.consumer)?));
    scopes.into_iter().map(consumer).collect()
}

#[cfg(test)]
mod tests;
