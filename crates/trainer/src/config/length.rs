//! [`StepCount`]: length of a run in optimizer steps or epochs.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LengthText;

/// Optimizer steps of a run, given as a number or as epochs: `"3 epochs"`. Epochs have no steps
/// until [`resolve`](Self::resolve).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "LengthText", into = "LengthText")]
#[schemars(inline)]
pub struct StepCount {
    steps: usize,
    epochs: Option<f64>,
}

impl StepCount {
    /// Steps; 0 for unresolved epochs.
    pub fn get(self) -> usize {
        self.steps
    }

    /// Epochs, if they are not resolved yet.
    pub fn epochs(self) -> Option<f64> {
        self.epochs
    }

    /// Converts epochs to steps, for `sequences` per epoch and `per_step` sequences per step.
    #[must_use]
    pub fn resolve(self, sequences: u64, per_step: usize) -> Self {
        match self.epochs {
            Some(epochs) => Self::from((epochs * sequences as f64 / per_step as f64).ceil() as usize),
            None => self,
        }
    }
}

impl From<usize> for StepCount {
    fn from(steps: usize) -> Self {
        Self { steps, epochs: None }
    }
}

impl fmt::Display for StepCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.epochs {
            Some(1.0) => write!(f, "1 epoch"),
            Some(epochs) => write!(f, "{epochs} epochs"),
            None => write!(f, "{}", self.steps),
        }
    }
}

/// Text that is not a length.
#[derive(Clone, Debug, thiserror::Error)]
#[error("`{0}` is not a number of steps, such as 600, or of epochs, such as \"3 epochs\"")]
pub struct NoLength(String);

impl FromStr for StepCount {
    type Err = NoLength;

    fn from_str(text: &str) -> Result<Self, NoLength> {
        if let Ok(steps) = text.trim().parse::<usize>() {
            return Ok(steps.into());
        }
        let number = text.trim().strip_suffix("epochs").or_else(|| text.trim().strip_suffix("epoch"));
        let epochs = number.and_then(|number| number.trim().parse::<f64>().ok());
        let epochs = epochs.filter(|epochs| *epochs > 0.0 && epochs.is_finite());
        epochs.map(|epochs| Self { steps: 0, epochs: Some(epochs) }).ok_or_else(|| NoLength(text.into()))
    }
}

impl TryFrom<LengthText> for StepCount {
    type Error = NoLength;

    fn try_from(written: LengthText) -> Result<Self, NoLength> {
        match written {
            LengthText::Number(steps) => Ok(steps.into()),
            LengthText::Text(text) => text.parse(),
        }
    }
}

impl From<StepCount> for LengthText {
    fn from(length: StepCount) -> Self {
        match length.epochs {
            Some(_) => Self::Text(length.to_string()),
            None => Self::Number(length.steps),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_become_steps() {
        let steps = |text: &str| text.parse::<StepCount>().unwrap().resolve(100, 8).get();
        let all = ["7", "1 epoch", "3 epochs", "0.5epochs", "0.001 epochs"].map(steps);
        assert_eq!(all, [7, 13, 38, 7, 1]);
        for text in ["", "epochs", "-1 epochs", "0 epochs", "inf epochs", "3 passes", "1e9"] {
            assert!(text.parse::<StepCount>().is_err(), "{text}");
        }
        let length: StepCount = "2.5 epochs".parse().unwrap();
        assert_eq!((length.get(), length.epochs(), length.to_string().parse().ok()), (0, Some(2.5), Some(length)));
    }
}
