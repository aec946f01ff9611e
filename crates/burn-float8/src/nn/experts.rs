//! [`dispatch`]: rows of a mixture to the ranks of their experts, and back.
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorPrimitive};

use crate::ops::functions::{AnyRoute, ExpertRows, find};

/// Rows on the ranks of their experts.
#[derive(Debug)]
pub struct Dispatched<B: Backend> {
    /// Rows of all ranks for this rank's experts, `[M', K]`. M' is at least 1.
    pub x: Tensor<B, 2>,
    /// Ends of this rank's experts.
    pub ends: Tensor<B, 1, Int>,
    /// The way back.
    pub route: ExpertRoute,
}

/// Way back of dispatched rows.
#[derive(Clone, Debug)]
pub struct ExpertRoute(Option<AnyRoute>);

/// Sends each row of x `[M, K]` to the rank of its expert. All ranks call it in the same order.
///
/// `ends` are of all experts, as in [`grouped_linear`](crate::grouped_linear), and `weight` is the
/// weight of any grouped linear of the mixture. Its other linears then read the rows on that rank.
/// Without ranks that divide the experts, x and `ends` are returned. Otherwise it reads `ends`, which
/// waits for the device.
///
/// A grouped linear sends its rows itself if this is not called. Once for a mixture is less traffic:
///
/// ```
/// use burn::tensor::backend::Backend;
/// use burn::tensor::{Int, Tensor};
/// use burn_float8::GroupedLinear;
/// use burn_float8::nn::{Dispatched, dispatch};
///
/// fn two_layers<B: Backend>(
///     [up, down]: [&GroupedLinear<B>; 2],
///     x: Tensor<B, 2>,
///     ends: Tensor<B, 1, Int>,
/// ) -> Tensor<B, 2> {
///     let Dispatched { x, ends, route } = dispatch(x, ends, &up.weight.val());
///     route.combine(down.forward(up.forward(x, ends.clone()), ends))
/// }
/// ```
///
/// # Panics
///
/// If the numbers of ends and experts differ, or a rank is lost.
pub fn dispatch<B: Backend>(x: Tensor<B, 2>, ends: Tensor<B, 1, Int>, weight: &Tensor<B, 3>) -> Dispatched<B> {
    let rows = find::<B>().and_then(|functions| {
        let [x, weight] = [x.clone().into_primitive().tensor(), weight.clone().into_primitive().tensor()];
        (functions.dispatch)(&x, &ends.clone().into_primitive(), &weight)
    });
    let Some(ExpertRows { x, ends, route }) = rows else { return Dispatched { x, ends, route: ExpertRoute(None) } };
    let x = Tensor::from_primitive(TensorPrimitive::Float(x));
    Dispatched { x, ends: Tensor::from_primitive(ends), route: ExpertRoute(Some(route)) }
}

impl ExpertRoute {
    /// Whether ranks divide the experts.
    pub(super) fn is_over_ranks(&self) -> bool {
        self.0.is_some()
    }

    /// Rows `[M, N]` of this rank's tokens, from the rows `[M', N]` of this rank's experts.
    ///
    /// # Panics
    ///
    /// If a rank is lost.
    pub fn combine<B: Backend>(&self, y: Tensor<B, 2>) -> Tensor<B, 2> {
        match (&self.0, find::<B>()) {
            (Some(route), Some(functions)) => {
                let rows = (functions.combine)(y.into_primitive().tensor(), route);
                Tensor::from_primitive(TensorPrimitive::Float(rows))
            }
            _ => y,
        }
    }
}
