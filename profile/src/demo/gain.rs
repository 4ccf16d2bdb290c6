//! What speculation gains, as measured and as a model predicts from the parts of the latency.
//!
//! With D the fixed mode's delivery, O the order path, Q queueing for the consumer and C its computation:
//!
//! ```text
//! free  e2e ≈ D + O + Q + C                 gain = free / fixed
//! fixed e2e ≈ max(D + O, D + Q + C)
//! ```
//!
//! All are means. Each side has its own O, Q and C: a free window's O is its delivery − D, because its delivery comes after
//! binding; the fixed side's O is confirm − delivery. With equal O on both sides the gain is greatest at Q + C = O, where it
//! is (D + 2·O) / (D + O) < 2. The maximum of two means is at most the mean of the maximum, so the fixed side is somewhat
//! slower than the model when its two branches are close.

use antelog_protocol::Ordering;
use serde::Serialize;

use super::{ModeResult, Repetition};
use crate::stats::Spread;

/// The parts of the latency: means in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Model {
    /// D: intended send → in hand in the fixed mode.
    pub delivery_us: f64,
    /// O of the free mode: its delivery − D.
    pub free_order_us: f64,
    /// Q of the free mode.
    pub free_queue_us: f64,
    /// C of the free mode.
    pub free_compute_us: f64,
    /// O of the fixed mode: confirm − delivery.
    pub fixed_order_us: f64,
    /// Q of the fixed mode.
    pub fixed_queue_us: f64,
    /// C of the fixed mode.
    pub fixed_compute_us: f64,
}

impl Model {
    /// Predicted mean end-to-end latency of the free mode in microseconds: D + O + Q + C.
    pub fn free_us(&self) -> f64 {
        self.delivery_us + self.free_order_us + self.free_queue_us + self.free_compute_us
    }

    /// Predicted mean end-to-end latency of the fixed mode in microseconds: max(D + O, D + Q + C).
    pub fn fixed_us(&self) -> f64 {
        self.delivery_us + self.fixed_order_us.max(self.fixed_queue_us + self.fixed_compute_us)
    }

    /// Predicted gain: free / fixed.
    pub fn gain(&self) -> f64 {
        self.free_us() / self.fixed_us()
    }

    /// The greatest gain that these D and O allow, reached at Q + C = the fixed O. Below 2 when both O are equal; above
    /// only in so far as the free mode's order path is the longer one.
    pub fn best_gain(&self) -> f64 {
        let fixed_us = self.delivery_us + self.fixed_order_us;
        (fixed_us + self.free_order_us) / fixed_us
    }
}

/// A free mode against the fixed one. Ratios are free / fixed: above 1 when speculation is faster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Gain {
    /// Of median delivery latencies, one ratio per repetition.
    pub delivery_p50: Spread,
    /// Of median end-to-end latencies, one ratio per repetition: hardly moved by a machine that stalls now and then.
    pub e2e_p50: Spread,
    /// Of mean end-to-end latencies, one ratio per repetition.
    pub e2e_mean: Spread,
    /// Of mean end-to-end latencies, as the model predicts it: the median over repetitions, like the ratio measured; the
    /// lower one of the middle two.
    pub e2e_predicted: f64,
    /// The parts it follows from: those of the repetition with the median prediction.
    pub model: Model,
}

/// The gain of `fixed` over `free`; `None` when no repetition of both has measured anything.
pub fn gain(free: &ModeResult, fixed: &ModeResult) -> Option<Gain> {
    assert!(fixed.mode == Ordering::Fixed && free.mode != Ordering::Fixed, "gains are of free over fixed");
    let (mut delivery, mut e2e_p50, mut e2e, mut models) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for a in &free.repetitions {
        // Repetitions are paired by their number: both were measured close to each other in time.
        let Some(b) = fixed.repetitions.iter().find(|b| b.number == a.number) else { continue };
        let model = model(a, b);
        let ratios = [
            a.delivery_p50_us / b.delivery_p50_us,
            a.e2e_p50_us / b.e2e_p50_us,
            a.e2e_mean_us / b.e2e_mean_us,
            model.gain(),
        ];
        if ratios.iter().all(|ratio| ratio.is_finite()) {
            delivery.push(ratios[0]);
            e2e_p50.push(ratios[1]);
            e2e.push(ratios[2]);
            models.push(model);
        }
    }
    models.sort_by(|a, b| a.gain().total_cmp(&b.gain()));
    let model = *models.get(models.len().saturating_sub(1) / 2)?;
    Some(Gain {
        delivery_p50: Spread::of(&delivery)?,
        e2e_p50: Spread::of(&e2e_p50)?,
        e2e_mean: Spread::of(&e2e)?,
        e2e_predicted: model.gain(),
        model,
    })
}

fn model(free: &Repetition, fixed: &Repetition) -> Model {
    Model {
        delivery_us: fixed.delivery_mean_us,
        // Never below 0: a free mode that delivers before the fixed one does has no order path to speak of.
        free_order_us: (free.delivery_mean_us - fixed.delivery_mean_us).max(0.0),
        free_queue_us: free.queue_mean_us,
        free_compute_us: free.compute_mean_us,
        fixed_order_us: fixed.confirm_wait_mean_us,
        fixed_queue_us: fixed.queue_mean_us,
        fixed_compute_us: fixed.compute_mean_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(delivery_us: f64, order_us: f64, queue_us: f64, compute_us: f64) -> Model {
        Model {
            delivery_us,
            free_order_us: order_us,
            free_queue_us: queue_us,
            free_compute_us: compute_us,
            fixed_order_us: order_us,
            fixed_queue_us: queue_us,
            fixed_compute_us: compute_us,
        }
    }

    #[test]
    fn a_long_order_path_hides_a_short_computation() {
        let model = model(300.0, 1000.0, 50.0, 150.0);
        assert_eq!((model.free_us(), model.fixed_us()), (1500.0, 1300.0));
        assert_eq!(model.gain(), 1500.0 / 1300.0);
    }

    #[test]
    fn a_long_computation_hides_the_order_path() {
        let model = model(300.0, 1000.0, 700.0, 3000.0);
        assert_eq!((model.free_us(), model.fixed_us()), (5000.0, 4000.0));
        assert_eq!(model.gain(), 1.25);
    }

    #[test]
    fn the_best_gain_is_where_both_are_equal() {
        let best = model(200.0, 1000.0, 400.0, 600.0);
        assert_eq!(best.gain(), 2200.0 / 1200.0);
        assert_eq!(best.best_gain(), best.gain());
        for compute_us in [0.0, 300.0, 599.0, 601.0, 900.0, 5000.0] {
            assert!(model(200.0, 1000.0, 400.0, compute_us).gain() < best.gain());
        }
    }

    #[test]
    fn each_side_has_its_own_order_path() {
        let model = Model { free_order_us: 1800.0, free_queue_us: 500.0, ..model(200.0, 1000.0, 400.0, 600.0) };
        assert_eq!((model.free_us(), model.fixed_us()), (3100.0, 1200.0));
        assert_eq!(model.best_gain(), 3000.0 / 1200.0);
    }
}
