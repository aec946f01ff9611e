//! The whole of a weight: its logical shape, and its values from all ranks where it is sharded.
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_std::Shape;

use super::Float8Tensor;
use crate::backend::Float8Backend;
use crate::profile::operation;

impl<B: Float8Backend> Float8Tensor<B> {
    /// The shape of the whole weight, of which this may be some rows.
    pub(crate) fn whole_shape(&self) -> Shape {
        match self.layer().and_then(|layer| layer.sharding()) {
            Some(sharding) => Shape::from(sharding.logical().to_vec()),
            None => self.shape(),
        }
    }

    /// The values of the whole weight in a dtype, which is the one that ranks exchange.
    pub(crate) fn into_whole(self, dtype: DType) -> FloatTensor<B> {
        let sharding = self.layer().and_then(|layer| layer.sharding()).cloned();
        let cast = |full: FloatTensor<B>| match full.dtype() == dtype {
            true => full,
            false => {
                let _timer = operation("float_cast");
                B::float_cast(full, FloatDType::from(dtype))
            }
        };
        let Some(sharding) = sharding else { return cast(self.full) };
        if !sharding.keeps_gathered() {
            return sharding.gather_values::<B>(cast(self.full));
        }
        let mut entries = self.cache().lock();
        if let Some(known) = entries.gathered.iter().find(|known| known.dtype() == dtype) {
            return known.clone();
        }
        let whole = sharding.gather_values::<B>(cast(self.full.clone()));
        entries.gathered.push(whole.clone());
        whole
    }
}
