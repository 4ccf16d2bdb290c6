//! Queueing, workers and release times, against numbers worked out by hand.

use super::*;
use crate::fake::{MS, US, VirtualClock};

struct Bench {
    consumer: Consumer,
    measured: Measured,
    clock: VirtualClock,
}

impl Bench {
    fn new(compute_ns: u64, workers: usize, kind: Compute) -> Bench {
        let consumer = Consumer::new(&ConsumerConfig { compute_ns, workers, kind }).unwrap();
        Bench { consumer, measured: Measured::new(0), clock: VirtualClock::default() }
    }

    /// At `us`: what arrives as (position, intended in us), up to where positions are bound, then a turn.
    fn at(&mut self, us: u64, delivered: &[(u64, u64)], upto: u64) -> &mut Bench {
        self.clock.spin_until(us * US);
        let now_ns = self.clock.now_ns();
        for (position, intended_us) in delivered {
            let stamp = Stamp { intended_ns: intended_us * US, sent_ns: intended_us * US, tag: 0 };
            self.consumer.on_deliver(now_ns, Position(*position), stamp, true, &mut self.measured);
        }
        self.consumer.on_confirm(now_ns, Position(upto), &mut self.measured);
        self.consumer.on_cycle(now_ns, &self.clock, &mut self.measured);
        self
    }

    /// All of a series, sorted, in microseconds: in steps of 10, since three digits are kept.
    fn all(series: &crate::stats::Series) -> Vec<u64> {
        let values = series.histogram().iter_recorded();
        values.flat_map(|v| vec![v.value_iterated_to() / (10 * US) * 10; v.count_at_value() as usize]).collect()
    }

    fn e2e(&self) -> Vec<u64> {
        Self::all(&self.measured.e2e)
    }
}

#[test]
fn an_output_leaves_at_the_later_of_confirm_and_done() {
    let mut bench = Bench::new(300 * US, 1, Compute::Timed);
    // Confirmed before it is done: done decides.
    bench.at(100, &[(0, 0)], 0).at(200, &[], 1).at(390, &[], 1);
    assert_eq!(bench.consumer.released(), 0);
    bench.at(400, &[], 1);
    assert_eq!(bench.e2e(), [400]);
    // Done before it is confirmed: the confirm decides.
    bench.at(500, &[(1, 500)], 1).at(800, &[], 1);
    assert_eq!(bench.consumer.released(), 1);
    bench.at(950, &[], 2);
    assert_eq!(bench.e2e(), [400, 450]);
    assert_eq!(Bench::all(&bench.measured.confirm_wait), [100, 450]);
    assert_eq!((bench.consumer.items.len(), bench.consumer.next_ns()), (0, None));
}

#[test]
fn a_serial_consumer_queues_and_takes_all_in_hand_as_one_batch() {
    let mut bench = Bench::new(1000 * US, 1, Compute::Timed);
    // Arrivals at 0, 300 and 600 and all bound at once. The first is computed 0–1000, the other two together 1000–2000.
    bench.at(0, &[(0, 0)], 1).at(300, &[(1, 300)], 2).at(600, &[(2, 600)], 3);
    assert_eq!(bench.consumer.next_ns(), Some(MS));
    bench.at(1000, &[], 3).at(1500, &[(3, 1500)], 4).at(2000, &[], 4).at(3000, &[], 4);
    assert_eq!(Bench::all(&bench.measured.queue), [0, 400, 500, 700]);
    assert_eq!(Bench::all(&bench.measured.compute), [1000; 4]);
    assert_eq!(bench.e2e(), [1000, 1400, 1500, 1700]);
}

#[test]
fn several_workers_compute_batches_at_once() {
    let mut bench = Bench::new(1000 * US, 2, Compute::Timed);
    // 0–1000 on the first worker, 300–1300 on the second, and what came at 600 waits for the first to be free.
    bench.at(0, &[(0, 0)], 1).at(300, &[(1, 300)], 2).at(600, &[(2, 600)], 3);
    bench.at(1000, &[], 3).at(1300, &[], 3).at(2000, &[], 3);
    assert_eq!(Bench::all(&bench.measured.queue), [0, 0, 400]);
    assert_eq!(bench.e2e(), [1000, 1000, 1400]);
    assert_eq!(bench.consumer.released(), 3);
}

#[test]
fn workers_may_finish_out_of_order() {
    let mut bench = Bench::new(1000 * US, 2, Compute::Timed);
    bench.at(0, &[(0, 0)], 0).at(500, &[(1, 500)], 0).at(1000, &[], 0).at(1500, &[], 0);
    assert_eq!((bench.consumer.released(), bench.consumer.items.len()), (0, 2));
    bench.at(2000, &[], 1).at(2500, &[], 2);
    assert_eq!(bench.e2e(), [2000, 2000]);
}

#[test]
fn a_spinning_computation_blocks_the_loop() {
    let mut bench = Bench::new(1000 * US, 1, Compute::Spin);
    bench.at(0, &[(0, 0)], 1);
    assert_eq!(bench.clock.now_ns(), MS);
    // This should have been received at 100; the loop was busy.
    bench.at(1000, &[(1, 100)], 2);
    assert_eq!(bench.e2e(), [1000, 1900]);
    assert_eq!(Bench::all(&bench.measured.delivery), [0, 900]);
}

#[test]
fn no_computation_ends_in_the_same_turn() {
    let mut bench = Bench::new(0, 1, Compute::Timed);
    bench.at(70, &[(0, 0), (1, 50)], 2);
    assert_eq!(bench.e2e(), [20, 70]);
}

#[test]
fn bound_records_are_confirmed_when_they_come() {
    let mut bench = Bench::new(100 * US, 1, Compute::Timed);
    let stamp = Stamp { intended_ns: 0, sent_ns: 20 * US, tag: 0 };
    bench.consumer.on_deliver(50 * US, Position(0), stamp, false, &mut bench.measured);
    bench.at(50, &[], 1).at(150, &[], 1);
    assert_eq!(Bench::all(&bench.measured.confirm), [50]);
    assert_eq!(Bench::all(&bench.measured.delivery_service), [30]);
    assert_eq!((bench.e2e(), bench.measured.totals.speculative), (vec![150], 0));
}

#[test]
fn a_failure_takes_back_and_what_comes_again_is_measured_again() {
    let mut bench = Bench::new(1000 * US, 1, Compute::Timed);
    bench.at(0, &[(0, 0)], 0).at(100, &[(1, 100), (2, 100)], 1);
    bench.consumer.on_fail(Position(1), &mut bench.measured);
    assert_eq!((bench.measured.totals.fails, bench.measured.totals.failed), (1, 2));
    // Position 1 was the failed shard's; the record at 2 still holds. Position 0 is not affected.
    bench.at(200, &[(2, 100)], 3).at(1000, &[], 3).at(2000, &[], 3);
    assert_eq!(bench.e2e(), [1000, 1900]);
    assert_eq!(Bench::all(&bench.measured.delivery), [0, 0, 0, 100]);
    assert_eq!(bench.measured.totals.delivered, 4);
}

#[test]
fn a_worker_whose_batch_failed_is_free() {
    let mut bench = Bench::new(1000 * US, 1, Compute::Timed);
    bench.at(0, &[(0, 0), (1, 0)], 0);
    bench.consumer.on_fail(Position(0), &mut bench.measured);
    bench.at(10, &[(1, 0)], 2).at(1010, &[], 2);
    assert_eq!(bench.e2e(), [1010]);
}

#[test]
fn the_warm_up_is_in_no_series() {
    let mut bench = Bench::new(100 * US, 1, Compute::Timed);
    bench.measured.from_ns = 50 * US;
    bench.at(60, &[(0, 49), (1, 50)], 2).at(160, &[], 2);
    assert_eq!(bench.e2e(), [110]);
    assert_eq!((bench.measured.totals.released, bench.measured.queue.count()), (2, 1));
}
