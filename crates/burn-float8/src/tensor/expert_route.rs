//! [`Route`]: way of a mixture's rows to the ranks of their experts, and back.
//!
//! ```text
//! x [M, C]     this rank's rows, by expert
//!     all-to-all, then each expert's rows together, in the order of the ranks
//! x [M', C]    rows of all ranks for this rank's experts
//! ```
//! These are the rows of one process that has the batches of all ranks, in its order.
use std::sync::Arc;

use burn::tensor::{Int, Tensor};
use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{FloatDType, TensorMetadata};
use burn_std::Shape;

use crate::backend::Float8Backend;
use crate::backend::host::ranges;

/// Exchange of a mixture's rows with the ranks of their experts. All ranks call these in the same
/// order.
pub trait RowExchange<B: Float8Backend>: Send + Sync {
    /// Experts of each rank.
    fn layout(&self) -> ExpertLayout;

    /// Rows of each expert on each rank, from this rank's.
    fn counts(&self, own: Vec<u32>) -> Vec<Vec<u32>>;

    /// Rows `[M', C]` from each rank, in the order of the ranks. The rows `[.., C]` begin with the rows
    /// for each rank. One row of zeros, if there are none.
    fn all_to_all(&self, rows: FloatTensor<B>, exchange: &Exchange) -> FloatTensor<B>;
}

/// Division of experts: rank r has the experts from r · `chunk`, fewer or none at the end.
#[derive(Clone, Copy, Debug)]
pub struct ExpertLayout {
    /// Number of all experts.
    pub experts: usize,
    /// Experts on each rank, padding included.
    pub chunk: usize,
    /// This rank, from 0.
    pub rank: usize,
}

/// Numbers of elements that a rank exchanges.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// Elements for each rank.
    pub sent: Vec<usize>,
    /// Elements from each rank.
    pub received: Vec<usize>,
}

impl Exchange {
    /// The exchange that returns every element.
    pub fn reversed(&self) -> Self {
        Self { sent: self.received.clone(), received: self.sent.clone() }
    }

    /// First element of each rank, from the numbers of elements.
    pub fn begins(counts: &[usize]) -> Vec<usize> {
        counts.iter().scan(0, |end, count| Some(core::mem::replace(end, *end + count))).collect()
    }

    /// The exchange of groups of `len` elements.
    pub fn of_groups(&self, len: usize) -> Self {
        let scaled = |counts: &[usize]| counts.iter().map(|count| count * len).collect();
        Self { sent: scaled(&self.sent), received: scaled(&self.received) }
    }
}

/// Direction of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the ranks that compute with them.
    Dispatch,
    /// Back.
    Combine,
}

impl Direction {
    pub(crate) fn reversed(self) -> Self {
        match self {
            Self::Dispatch => Self::Combine,
            Self::Combine => Self::Dispatch,
        }
    }
}

/// Order of received rows by expert.
struct Order<B: Float8Backend> {
    /// Received row at each place.
    rows: Tensor<B, 1, Int>,
    /// Place of each received row.
    places: Tensor<B, 1, Int>,
}

/// Ranks of the rows of one batch.
pub struct Route<B: Float8Backend> {
    ranks: Arc<dyn RowExchange<B>>,
    /// Numbers of rows.
    exchange: Exchange,
    /// None if rows are received in order.
    order: Option<Order<B>>,
    /// M.
    rows: usize,
    /// Ends of this rank's experts.
    pub(crate) ends: IntTensor<B>,
}

impl<B: Float8Backend> core::fmt::Debug for Route<B> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{:?}", self.exchange)
    }
}

impl<B: Float8Backend> Route<B> {
    /// Route of `rows` rows with these ends of all experts. Reads the ends, and exchanges the numbers
    /// of rows.
    ///
    /// # Panics
    ///
    /// If the numbers of ends and experts differ.
    pub(crate) fn new(ranks: Arc<dyn RowExchange<B>>, rows: usize, ends: &IntTensor<B>, device: &Device<B>) -> Self {
        let ExpertLayout { experts, chunk, rank } = ranks.layout();
        let own: Vec<u32> = ranges::<B>(ends, rows).iter().map(|rows| rows.len() as u32).collect();
        assert!(own.len() == experts, "a mixture of {experts} experts was given the ends of {}", own.len());
        let counts = ranks.counts(own);
        let of = |rank: usize| (rank * chunk).min(experts)..((rank + 1) * chunk).min(experts);
        let rows_of = |from: usize, to: usize| counts[from][of(to)].iter().sum::<u32>() as usize;
        let exchange = Exchange {
            sent: (0..counts.len()).map(|to| rows_of(rank, to)).collect(),
            received: (0..counts.len()).map(|from| rows_of(from, rank)).collect(),
        };
        // Received by rank and expert, wanted by expert and rank.
        let mut next = Exchange::begins(&exchange.received);
        let (mut order, mut own_ends) = (vec![], vec![]);
        for expert in of(rank) {
            for (next, counts) in next.iter_mut().zip(&counts) {
                let end = *next + counts[expert] as usize;
                order.extend(*next..end);
                *next = end;
            }
            own_ends.push(order.len() as i32);
        }
        // Experts of padding have no rows.
        own_ends.resize(chunk, order.len() as i32);
        let ints = |values: Vec<i32>| Tensor::<B, 1, Int>::from_data(&values[..], device);
        let order = (!order.is_sorted()).then(|| {
            let mut places = vec![0; order.len()];
            order.iter().enumerate().for_each(|(place, row)| places[*row] = place as i32);
            Order { rows: ints(order.into_iter().map(|row| row as i32).collect()), places: ints(places) }
        });
        Self { ranks, exchange, order, rows, ends: ints(own_ends).cast(ends.dtype()).into_primitive() }
    }

    /// Rows `[M', C]` from `[M, C]`, or `[M, C]` from `[M', C]`. Rows of no expert are zeros.
    pub(crate) fn apply(&self, rows: FloatTensor<B>, direction: Direction) -> FloatTensor<B> {
        let ordered = |rows: FloatTensor<B>, by: fn(&Order<B>) -> &Tensor<B, 1, Int>| match &self.order {
            Some(order) => B::float_select(rows, 0, by(order).clone().into_primitive()),
            None => rows,
        };
        match direction {
            Direction::Dispatch => ordered(self.ranks.all_to_all(rows, &self.exchange), |order| &order.rows),
            Direction::Combine => {
                let rows = ordered(rows, |order| &order.places);
                self.with_rest(self.ranks.all_to_all(rows, &self.exchange.reversed()))
            }
        }
    }

    /// All M rows, from the rows of experts.
    fn with_rest(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        let sent = self.exchange.sent.iter().sum::<usize>();
        if sent == self.rows && sent > 0 {
            return own;
        }
        let (cols, dtype, device) = (own.shape()[1], FloatDType::from(own.dtype()), B::float_device(&own));
        let rest = B::float_zeros(Shape::from(vec![self.rows - sent, cols]), &device, dtype);
        if sent == 0 { rest } else { B::float_cat(vec![own, rest], 0) }
    }
}
