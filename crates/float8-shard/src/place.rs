//! [`Place`]: place of a rank's elements of a parameter, and [`Parts`] of a tensor-parallel model.
use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_float8::Float8Stack;
use burn_float8::backend::Float8Backend;
use burn_float8::shard_hooks::{self, NamedParam, ParallelHooks, ParallelStyle, visit_params};
use burn_std::Shape;
use serde::Serialize;

use crate::sharding::Sharding;

/// Place of this rank's elements of a parameter, or of a tensor with its shape, in the whole one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Place {
    /// Path in the module tree.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Begin and end of this rank's rows; None if it has all.
    pub rows: Option<[usize; 2]>,
    /// Begin and end of this rank's columns; None if it has all.
    pub cols: Option<[usize; 2]>,
    /// Whether the ranks of [`Sharded::shard_communicator`](crate::Sharded::shard_communicator) divide it.
    pub is_shard: bool,
    /// Whether the ranks of [`ShardConfig::tensor`](crate::ShardConfig::tensor) divide it.
    pub is_part: bool,
}

impl Place {
    /// Place of a parameter that this rank has whole.
    pub fn whole(name: impl Into<String>, shape: impl Into<Vec<usize>>) -> Self {
        let (name, shape) = (name.into(), shape.into());
        Self { name, shape, rows: None, cols: None, is_shard: false, is_part: false }
    }

    /// Shape of this rank's elements, without padding.
    pub fn own_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if let Some(rows) = shape.first_mut() {
            *rows = self.own_rows().len();
        }
        if let Some([begin, end]) = self.cols {
            shape[1] = end - begin;
        }
        shape
    }

    /// This rank's rows.
    pub fn own_rows(&self) -> Range<usize> {
        let [begin, end] = self.rows.unwrap_or([0, self.shape.first().copied().unwrap_or(1)]);
        begin..end
    }
}

/// Path of a parameter's module; the parameter's own, if it is the model.
pub(crate) fn module_of(parameter: &str) -> &str {
    parameter.rsplit_once('.').map_or(parameter, |(module, _)| module)
}

/// Implements [`Sharded::parameters`](crate::Sharded::parameters).
pub(crate) fn parameters<B: Float8Stack, M: Module<B>>(model: &M) -> Vec<Place> {
    let (mut places, mut parts) = (vec![], Parts::<B::Inner>::default());
    visit_params::<B, M>(model, |param| {
        let mut place = Place::whole(param.name(), param.shape.to_vec());
        if let Some(sharding) = param.float().and_then(|value| Sharding::of_value::<B>(&value)) {
            let Range { start, end } = sharding.rows();
            place = Place { rows: Some([start, end]), is_shard: sharding.is_divided(), ..place };
            place.shape.clone_from(&sharding.whole);
        }
        if let Some(ParameterPart { hooks, axis }) = parts.next(param) {
            let (len, part) = (place.shape[axis], hooks.part());
            (place.shape[axis], place.is_part) = (part.ranks * len, true);
            let before = part.range(place.shape[axis]).start;
            let own = |[begin, end]: [usize; 2]| Some([before + begin, before + end]);
            match axis {
                0 => place.rows = own(place.rows.unwrap_or([0, len])),
                _ => place.cols = own([0, len]),
            }
        }
        places.push(place);
    });
    places
}

/// Part of a parameter by tensor parallelism.
pub(crate) struct ParameterPart<B: Float8Backend> {
    hooks: Arc<dyn ParallelHooks<B>>,
    axis: usize,
}

impl<B: Float8Backend> ParameterPart<B> {
    /// The whole parameter, from the parts of all ranks.
    pub(crate) fn gather(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        let rows = B::float_swap_dims(own, 0, self.axis);
        let mut shape = rows.shape().to_vec();
        let matrix = [shape[0], shape[1..].iter().product()];
        let all = self.hooks.gather_rows(B::float_reshape(rows, Shape::from(matrix.to_vec())));
        shape[0] = all.shape()[0];
        B::float_swap_dims(B::float_reshape(all, Shape::from(shape)), 0, self.axis)
    }
}

/// Parts of a model's parameters, in the order of a walk.
#[derive(Default)]
pub(crate) struct Parts<B: Float8Backend> {
    /// Module of the last weight that ranks divide.
    of_weight: Option<(String, Arc<dyn ParallelHooks<B>>)>,
}

impl<B: Float8Backend> Parts<B> {
    /// Part of the next parameter, if ranks divide it. A bias follows its weight.
    pub(crate) fn next<S: Float8Stack<Inner = B>>(&mut self, param: &NamedParam<'_, S>) -> Option<ParameterPart<B>> {
        let name = param.name();
        let module = module_of(&name);
        let layer = param.float().and_then(|value| S::layer(&value));
        if let Some(hooks) = layer.and_then(|layer| shard_hooks::parallel::<B>(&layer)) {
            self.of_weight = Some((module.into(), hooks.clone()));
            let axis = usize::from(hooks.part().style == ParallelStyle::Colwise);
            return Some(ParameterPart { hooks, axis });
        }
        let (_, hooks) = self.of_weight.as_ref().filter(|(of, hooks)| {
            of == module && hooks.part().style == ParallelStyle::Colwise && param.shape.num_dims() == 1
        })?;
        Some(ParameterPart { hooks: hooks.clone(), axis: 0 })
    }
}
