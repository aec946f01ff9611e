//! [`Text`]: tokenizer and chat templates of a model.

use crate::{ChatTemplate, JobError, Message, Tokenizer};

/// Tokenizer, and chat template if there is one.
#[derive(Debug)]
pub struct Text {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Chat template.
    pub template: Option<ChatTemplate>,
    /// Chat template with the variables of prompts.
    pub prompts: Option<ChatTemplate>,
}

impl Text {
    /// Prompt tokens of `text`, or of a chat in which a user writes `text`.
    ///
    /// # Errors
    /// [`JobError::NoTemplate`]; text that the template or the tokenizer refuses.
    pub fn prompt(&self, text: &str, is_chat: bool) -> Result<Vec<u32>, JobError> {
        if !is_chat {
            return Ok(self.tokenizer.prompt(text)?);
        }
        let template = self.prompts.as_ref().ok_or(JobError::NoTemplate)?;
        Ok(template.prompt(&self.tokenizer, &[Message::new("user", text)])?)
    }

    /// Tokens that end generation: the tokenizer's, and the one with which the template ends
    /// assistant turns.
    pub fn stop(&self) -> Vec<u32> {
        let mut stop = self.tokenizer.stop().to_vec();
        let end = self.template.as_ref().and_then(|template| template.turn_end(&self.tokenizer));
        stop.extend(end.filter(|end| !self.tokenizer.stop().contains(end)));
        stop
    }
}
