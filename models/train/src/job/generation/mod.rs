//! Text after prompts, as a configuration has it sampled.

mod stop;

use std::io::Write;
use std::num::NonZero;

use burn::tensor::backend::Backend;
use device_select::SelectedDevice;

use self::stop::StopStrings;
use super::config::RunConfig;
use super::generate_section::GenerateSection;
use super::text::Text;
use crate::model::{Batching, CausalLm, GenerateOptions, generate};
use crate::{JobError, TextStream};

/// What is generated: by the configuration, on a device.
pub(super) struct Generation<'a> {
    section: &'a GenerateSection,
    text: &'a Text,
    options: GenerateOptions,
}

/// What has become of a prompt.
struct Output<'a> {
    /// None once the text has ended.
    stream: Option<TextStream<'a>>,
    stop: StopStrings<'a>,
}

impl<'a> Generation<'a> {
    /// `independent_rows`: how many rows the linears of the model, but for its output layer, compute as if each were alone.
    pub(super) fn new<S>(
        config: &'a RunConfig<S>,
        text: &'a Text,
        selected: &SelectedDevice,
        independent_rows: usize,
    ) -> Self {
        let (section, seed) = (&config.generate, config.training.seed);
        let options = GenerateOptions {
            stop: text.stop(),
            sampling: section.sampling(seed),
            filters: section.filters(),
            cache: section.kv_cache,
            batching: match (section.together, selected, NonZero::new(independent_rows)) {
                (Some(true), ..) => Batching::All,
                (None, SelectedDevice::Cpu, Some(rows)) => Batching::Exact(rows),
                (Some(false), ..) | (None, SelectedDevice::Cpu, None) => Batching::Alone,
                (None, ..) => Batching::All,
            },
            ..GenerateOptions::new(section.max_new_tokens, text.tokenizer.num_choices())
        };
        Self { section, text, options }
    }

    /// How many prompts are generated together; a group of so many follows another.
    pub(super) fn batch_size(&self, prompts: usize) -> usize {
        self.options.batching.size(prompts)
    }

    /// Gives the text that follows each of `prompts` to `take`, piece by piece, with the number of its prompt.
    pub(super) fn run<B: Backend, M: CausalLm<B>>(
        &self,
        model: &M,
        prompts: &[Vec<u32>],
        mut take: impl FnMut(usize, &str) -> Result<(), JobError>,
    ) -> Result<(), JobError> {
        let output = |prompt: &Vec<u32>| -> Result<Output<'_>, JobError> {
            let stream = self.text.tokenizer.stream_text_after(prompt)?;
            Ok(Output { stream: Some(stream), stop: StopStrings::new(&self.section.stop) })
        };
        let mut outputs = prompts.iter().map(output).collect::<Result<Vec<_>, _>>()?;
        generate(model, prompts, &self.options, &mut |number, token| {
            let Output { stream, stop } = &mut outputs[number];
            let Some(mut open) = stream.take() else { return Ok(false) };
            let Some(token) = token else {
                let (piece, ends) = stop.push(&open.finish()?);
                let rest = if ends { String::new() } else { stop.finish() };
                take(number, &(piece + &rest))?;
                return Ok(false);
            };
            let (piece, ends) = stop.push(&open.push(token)?);
            *stream = (!ends).then_some(open);
            take(number, &piece)?;
            Ok(!ends)
        })
    }
}

/// Prints texts one after another.
pub(super) struct Printer<'a> {
    prompts: &'a [String],
    is_chat: bool,
    out: &'a mut dyn Write,
    /// Texts that are begun.
    begun: usize,
    /// What waits for its turn.
    waiting: Vec<String>,
}

impl<'a> Printer<'a> {
    /// Nothing is printed yet. In a conversation answers are printed without what they answer.
    pub(super) fn new(prompts: &'a [String], is_chat: bool, out: &'a mut dyn Write) -> Result<Self, JobError> {
        let mut printer = Self { prompts, is_chat, out, begun: 0, waiting: vec![String::new(); prompts.len()] };
        printer.begin()?;
        Ok(printer)
    }

    /// Begins the next text.
    fn begin(&mut self) -> Result<(), JobError> {
        let (number, count) = (self.begun, self.prompts.len());
        if number > 0 {
            writeln!(self.out)?;
        }
        if count > 1 {
            writeln!(self.out, "--- {} of {count}", number + 1)?;
        }
        if !self.is_chat {
            write!(self.out, "{}", self.prompts[number])?;
        }
        self.begun += 1;
        Ok(self.out.flush()?)
    }

    /// Prints a piece if it is its text's turn: of those that come by turns, in batches of so many, all but the first wait.
    pub(super) fn print(&mut self, number: usize, piece: &str, batch: usize) -> Result<(), JobError> {
        // The texts of earlier batches are whole.
        self.print_waiting(number / batch * batch + 1)?;
        if number >= self.begun {
            self.waiting[number].push_str(piece);
            return Ok(());
        }
        write!(self.out, "{piece}")?;
        Ok(self.out.flush()?)
    }

    /// Prints what has waited.
    pub(super) fn finish(mut self) -> Result<(), JobError> {
        self.print_waiting(self.prompts.len())?;
        Ok(writeln!(self.out)?)
    }

    /// Begins the first `texts`, with what has waited of them.
    fn print_waiting(&mut self, texts: usize) -> Result<(), JobError> {
        while self.begun < texts {
            self.begin()?;
            write!(self.out, "{}", self.waiting[self.begun - 1])?;
        }
        Ok(())
    }
}
